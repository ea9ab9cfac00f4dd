"""`trtllm-disagg bench strategies`: which order, with how many workers, for a model, GPUs and traffic."""
