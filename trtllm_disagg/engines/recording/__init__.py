"""Shipped stand-ins, to test code built on trtllm_disagg without an engine."""
