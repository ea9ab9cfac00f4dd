"""What an engine's error means: by its category where it has one, by its words where not."""

from __future__ import annotations

from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    InvalidRequestError,
    KvTransferError,
    PeerUnavailableError,
)

#: DisaggError.category, as the embedded engine reports it.
_BY_CATEGORY: dict[str, type[DisaggError]] = {
    InvalidRequestError.category: InvalidRequestError,
    PeerUnavailableError.category: KvTransferError,
}

#: TensorRT-LLM's RequestError says no more than this, in lower case. Where its source has the words:
_BY_WORDS: tuple[tuple[str, type[DisaggError]], ...] = (
    ("kv cache transfer", KvTransferError),  # _torch/pyexecutor/py_executor.py
    ("default_max_tokens", InvalidRequestError),  # executor/base_worker.py, _deduce_max_tokens
    ("should not exceed max_num_tokens", InvalidRequestError),  # llmapi/llm.py, _check_arguments
    ("must be greater than 0", InvalidRequestError),  # executor/base_worker.py, of max_tokens
)


def translate(error: Exception, is_request_error: bool = True) -> DisaggError:
    """`is_request_error`: one of the request, not one that the engine was never meant to raise."""
    message = str(error) if is_request_error else f"{type(error).__name__}: {error}"
    category = getattr(error, "category", None)
    if category is not None:
        return _BY_CATEGORY.get(category, EngineError)(message)
    text = message.lower()
    kind = next((kind for words, kind in _BY_WORDS if is_request_error and words in text), EngineError)
    return kind(message)
