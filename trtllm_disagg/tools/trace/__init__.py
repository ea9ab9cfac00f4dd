"""`trtllm-disagg trace`: where the time of a request went."""
