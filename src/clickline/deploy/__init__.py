"""Deploys the whole system to Kubernetes from the same YAML."""
