"""One file per strategy: builds its answer to whole requests. `trtllm_disagg.strategies` lists them."""
