"""Bytes on the wire: the messages of the protocols we speak."""
