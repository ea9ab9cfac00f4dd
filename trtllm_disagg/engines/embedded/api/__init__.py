"""The LLM API of TensorRT-LLM on the embedded engine."""
