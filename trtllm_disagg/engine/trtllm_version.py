"""Versions of TensorRT-LLM, in their order, and what is known to change with them."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from trtllm_disagg.errors import ConfigError

log = logging.getLogger(__name__)

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.?rc(\d+))?(?:\.post(\d+))?(?:[.+].*)?")
#: The candidate number of a release, which sorts after all its release candidates.
_RELEASED = 1_000_000


@dataclass(frozen=True, slots=True, order=True)
class TrtllmVersion:
    """Sorts as in pip: 1.3.0rc9 < 1.3.0rc22 < 1.3.0."""

    major: int
    minor: int
    patch: int
    candidate: int = _RELEASED
    post: int = 0

    @classmethod
    def parse(cls, text: str, key: str = "--trtllm-version") -> TrtllmVersion:
        """Raises ConfigError, which names `key`, for a text that is no version."""
        match = _VERSION.fullmatch(text.strip())
        if match is None:
            raise ConfigError.bad_value(key, text, "a version of TensorRT-LLM such as 1.3.0rc29")
        major, minor, patch, candidate, post = match.groups()
        last = _RELEASED if candidate is None else int(candidate)
        return cls(int(major), int(minor), int(patch), last, int(post or 0))

    def __str__(self) -> str:
        candidate = "" if self.candidate == _RELEASED else f"rc{self.candidate}"
        post = f".post{self.post}" if self.post else ""
        return f"{self.major}.{self.minor}.{self.patch}{candidate}{post}"


#: The version that ai-dynamo 1.6.1 and this package's extra `tensorrt-llm` install.
NEWEST_KNOWN = TrtllmVersion.parse("1.3.0rc29")
#: From here on `get_global_disagg_request_id` takes a node and a process, and a context server may overlap its steps
#: (PR 10755).
OLDEST_SERVED = TrtllmVersion.parse("1.3.0rc22")
#: From here on there are `disagg_request_id` and the names that a worker imports; older ones are refused by name. Up to
#: rc21 the worker's handoff ids come of the function's one argument.
OLDEST_TAKEN = TrtllmVersion.parse("1.3.0rc5")
#: `kv_transfer_timeout_ms` is 60 s by default, where 1.2 had none.
TRANSFERS_END_BY_DEFAULT = TrtllmVersion.parse("1.3.0rc22")
#: From here on, at the latest, transceiver_runtime "auto" is the Python transceiver where it can serve (PR 18248).
PYTHON_TRANSCEIVER_BY_DEFAULT = NEWEST_KNOWN


def require_taken(module: Any) -> None:
    """Raises ConfigError for a `tensorrt_llm` that is too old. A module without a release's version is a user's own
    build, and accepted.
    """
    text = str(getattr(module, "__version__", ""))
    if _VERSION.fullmatch(text) is None:
        return
    version = TrtllmVersion.parse(text)
    if version < OLDEST_TAKEN:
        raise ConfigError.bad_value(
            "--engine",
            f"tensorrt_llm {version}",
            f"tensorrt_llm {OLDEST_TAKEN} or newer ({NEWEST_KNOWN} is what ai-dynamo 1.6.1 comes with): older ones "
            "have no disagg_request_id, and refuse context_only requests under the overlap scheduler",
        )
    if version < OLDEST_SERVED:
        log.warning(
            "TensorRT-LLM %s is older than %s, the oldest that doctor accepts", version, OLDEST_SERVED
        )


def installed_version() -> str | None:
    """The version of TensorRT-LLM in this environment, read without importing it; None where it is not installed."""
    for name in ("tensorrt_llm", "tensorrt-llm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
