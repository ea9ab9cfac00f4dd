"""A Dynamo worker for TensorRT-LLM that switches disaggregation strategies (start at docs/explanation/structure.md)."""

__version__ = "0.3.0.dev0"
#: The version that requirements/dynamo.txt installs.
DYNAMO_VERSION = "1.6.1"
#: requirements/dynamo.txt explains `--no-deps`.
INSTALL_DYNAMO = f"pip install --no-deps ai-dynamo=={DYNAMO_VERSION} ai-dynamo-runtime=={DYNAMO_VERSION}"
