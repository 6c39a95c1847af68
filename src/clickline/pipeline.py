"""The whole flow, read top to bottom."""
