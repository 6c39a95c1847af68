"""One module for each protocol: bytes in, values; scores, bytes out."""
