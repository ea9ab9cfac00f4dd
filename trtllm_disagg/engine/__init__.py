"""The engine behind a worker: the table of engines, their LLM API, and what a worker asks of it."""
