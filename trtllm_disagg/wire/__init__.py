"""Converts requests, answers and handoffs between dicts on the wire and the types of `types.py`."""
