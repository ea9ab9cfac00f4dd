"""The name of `testing.recording` in 0.1, kept for one release."""

from trtllm_disagg.testing.recording import LLM, InstantOutput, Pace, instant_token

__all__ = ["LLM", "InstantOutput", "Pace", "instant_token"]
