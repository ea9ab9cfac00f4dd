"""A pytest plugin for the child process that runs the tests of Dynamo's own worker on the embedded engine.

Those tests skip themselves without a GPU, since TensorRT-LLM cannot be imported then; the embedded engine can.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

#: Tests that cannot run here, by the end of their id, with the reason.
LEFT_OUT = {
    "test_trtllm_unit.py::test_custom_jinja_template_valid_path": "its template is not in the wheel",
    "test_trtllm_unit.py::test_custom_jinja_template_env_var_expansion": "its template is not in the wheel",
    "test_only_trtllm_handlers_declare_response_sender": "reads the sources of Dynamo's other workers, for 20 s",
    "test_trtllm_multimodal_processor.py::test_nvdec_video_data_builds_pt_videodata": "video is not served",
    "test_trtllm_logits_runtime.py::test_adapter_enters_engine_cuda_stream": "needs a stream of CUDA",
}

# Without a flag for their number, their worker counts GPUs.
torch.cuda.device_count = lambda: 1


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Show a GPU while modules are imported, when the skips check; hide it afterwards."""
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        return (yield)
    finally:
        torch.cuda.is_available = is_available


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raises UsageError if an excluded test does not exist."""
    left_out = {item.nodeid: item for item in items if item.nodeid.endswith(tuple(LEFT_OUT))}
    if unknown := [name for name in LEFT_OUT if not any(nodeid.endswith(name) for nodeid in left_out)]:
        raise pytest.UsageError(f"left out, and not there: {', '.join(unknown)}")
    config.hook.pytest_deselected(items=list(left_out.values()))
    items[:] = [item for item in items if item.nodeid not in left_out]
