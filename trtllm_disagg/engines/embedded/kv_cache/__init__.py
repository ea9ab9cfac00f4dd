"""The paged KV cache: block accounting, prefix reuse, and the memory itself."""
