"""The stages, in the order of the flow. They meet at files: none imports another."""
