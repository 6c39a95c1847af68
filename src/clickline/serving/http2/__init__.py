"""The part of HTTP/2 that gRPC uses, on the event loop: frames in, messages out. See README.md."""
