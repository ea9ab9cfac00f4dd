"""Arguments of the LLM API, and the checkpoint that they name, checked before anything is built."""
