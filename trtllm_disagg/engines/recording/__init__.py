"""Stand-ins that are shipped, so that code built on trtllm_disagg can be tested without an engine."""
