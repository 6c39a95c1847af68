"""Wire formats: the messages of the supported protocols, as bytes."""
