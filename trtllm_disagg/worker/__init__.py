"""One worker, from command line to serving."""
