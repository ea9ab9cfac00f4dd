"""A Dynamo worker for TensorRT-LLM with a disaggregation strategy switch (start at docs/explanation/structure.md)."""

__version__ = "0.2.0"
