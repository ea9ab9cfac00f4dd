"""`trtllm-disagg switch`: another order for a deployment that serves."""
