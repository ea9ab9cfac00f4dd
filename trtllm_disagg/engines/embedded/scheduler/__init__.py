"""Chooses the sequences of the next step and their KV blocks."""
