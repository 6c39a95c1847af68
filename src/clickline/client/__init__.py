"""Calls a server: what a program needs to get scores."""
