"""The web page: what runs, what was learned, what is served."""
