"""One file for each strategy: the builder of its answer to whole requests. `trtllm_disagg.strategies` lists them."""
