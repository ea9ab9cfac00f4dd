"""Moving KV blocks from the worker that prefilled a prompt to the one that decodes it."""
