"""The whole pipeline: prepare, train, evaluate, gate, publish, serve, and keep training as new hours arrive."""
