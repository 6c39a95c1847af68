"""One forward pass over a published version."""
