"""Versions of TensorRT-LLM, in their order, and what is known to change with them."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

from packaging.version import Version

from trtllm_disagg.errors import ConfigError

log = logging.getLogger(__name__)


class TrtllmVersion(Version):
    @classmethod
    def parse(cls, text: str, key: str = "--trtllm-version") -> TrtllmVersion:
        """A release or a candidate, without its local part. Raises ConfigError, which names `key`, for another text."""
        try:
            version = cls(text.partition("+")[0])
            if len(version.release) != 3 or version.is_devrelease or text.startswith("v"):
                raise ValueError
        except ValueError:
            raise ConfigError.bad_value(key, text, "a version of TensorRT-LLM such as 1.3.0rc29") from None
        return version


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
    """Raises ConfigError for a `tensorrt_llm` that is too old. One without a release's version is an own build."""
    try:
        version = TrtllmVersion.parse(str(getattr(module, "__version__", "")))
    except ConfigError:
        return
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
