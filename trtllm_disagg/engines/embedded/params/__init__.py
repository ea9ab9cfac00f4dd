"""Checks the LLM API's arguments and the checkpoint before anything is built."""
