"""Which sequences run in the next step, and with which KV blocks."""
