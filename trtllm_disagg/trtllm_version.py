"""Versions of TensorRT-LLM, in their order, and what is known to change with them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

from trtllm_disagg.errors import ConfigError

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.?rc(\d+))?(?:\.post(\d+))?(?:[.+].*)?")
#: Of a version that is no release candidate: it comes after all of them.
_RELEASED = 1_000_000


@dataclass(frozen=True, slots=True, order=True)
class TrtllmVersion:
    """Compares as pip does: 1.3.0rc9 < 1.3.0rc22 < 1.3.0."""

    major: int
    minor: int
    patch: int
    candidate: int = _RELEASED
    post: int = 0

    @classmethod
    def parse(cls, text: str, key: str = "--trtllm-version") -> TrtllmVersion:
        """Raises ConfigError, naming `key`."""
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


#: What ai-dynamo 1.6.1 is released with, and this project's extra `tensorrt-llm`.
NEWEST_KNOWN = TrtllmVersion.parse("1.3.0rc29")
#: From here on `get_global_disagg_request_id` takes a node and a process, and a context server may overlap its steps
#: (PR 10755).
OLDEST_SERVED = TrtllmVersion.parse("1.3.0rc22")
#: `kv_transfer_timeout_ms` is 60 s by default, where 1.2 had none.
TRANSFERS_END_BY_DEFAULT = TrtllmVersion.parse("1.3.0rc22")


def installed_version() -> str | None:
    """Of TensorRT-LLM in this environment, without loading it; None where it is not installed."""
    for name in ("tensorrt_llm", "tensorrt-llm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
