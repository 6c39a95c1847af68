"""The sparse table as files that are only read: built once, mapped by every server."""
