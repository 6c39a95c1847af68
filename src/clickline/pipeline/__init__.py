"""The whole flow: prepare, train, evaluate, gate, publish, serve, and go on as hours arrive."""
