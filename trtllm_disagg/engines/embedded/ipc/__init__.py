"""One socket with typed messages, between the LLM object and its engine core process."""
