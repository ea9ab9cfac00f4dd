"""A whole deployment on one machine: `trtllm-disagg up`, and context managers for tests."""
