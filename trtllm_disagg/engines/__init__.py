"""Engines without TensorRT-LLM behind its LLM API. The plugin finds them by `engine.table`."""
