"""One file a strategy: how a request is answered as a whole. `trtllm_disagg.strategies` lists them."""
