"""`trtllm-disagg up` runs a whole deployment on one machine; context managers do so for tests."""
