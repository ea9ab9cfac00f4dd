"""KV transfer as the engine core sees it."""
