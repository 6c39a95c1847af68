"""Scores requests with a published version: encode, look up rows, run the network."""
