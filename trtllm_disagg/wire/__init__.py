"""Conversion of requests, answers and handoffs between dicts, as they are on the wire, and the types of `types.py`."""
