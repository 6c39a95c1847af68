"""Logs as a config describes them, become labelled rows: for every stage that reads raw logs."""
