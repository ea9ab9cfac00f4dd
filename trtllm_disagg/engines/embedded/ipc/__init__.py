"""Between the LLM object and its engine core process: one socket, typed messages."""
