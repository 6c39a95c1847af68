"""Kubernetes: the whole system from the same YAML."""
