"""Requests, results and handoffs as dicts, and the types that the rest of the code knows."""
