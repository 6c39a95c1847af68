"""The studio, a web UI of the pipeline, its runs and versions, and the endpoint."""
