"""One module per protocol: decodes request bytes to rows, and encodes scores to response bytes."""
