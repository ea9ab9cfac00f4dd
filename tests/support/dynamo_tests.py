"""A pytest plugin for the child process that runs the tests of Dynamo's own worker on the embedded engine.

Those tests skip themselves where no GPU is: TensorRT-LLM cannot be imported there. The embedded engine can.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

#: Tests that cannot run here, by the end of their id, and why.
LEFT_OUT = {
    "test_trtllm_unit.py::test_custom_jinja_template_valid_path": "its template is not in the wheel",
    "test_trtllm_unit.py::test_custom_jinja_template_env_var_expansion": "its template is not in the wheel",
    "test_only_trtllm_handlers_declare_response_sender": "reads the sources of Dynamo's other workers, for 20 s",
    "test_trtllm_logits_runtime.py::test_adapter_enters_engine_cuda_stream": "needs a stream of CUDA",
}

# Their worker counts GPUs where its flags do not say how many there are.
torch.cuda.device_count = lambda: 1


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """The skips ask while their modules are imported; what runs later finds no GPU."""
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        return (yield)
    finally:
        torch.cuda.is_available = is_available


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raises UsageError for a test that is left out and does not exist."""
    left_out = {item.nodeid: item for item in items if item.nodeid.endswith(tuple(LEFT_OUT))}
    if unknown := [name for name in LEFT_OUT if not any(nodeid.endswith(name) for nodeid in left_out)]:
        raise pytest.UsageError(f"left out, and not there: {', '.join(unknown)}")
    config.hook.pytest_deselected(items=list(left_out.values()))
    items[:] = [item for item in items if item.nodeid not in left_out]
