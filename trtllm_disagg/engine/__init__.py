"""The engine behind a worker: the table of engines, the LLM API that each offers, and what a worker asks of it."""
