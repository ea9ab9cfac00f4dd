"""One worker from its command line to serving."""
