"""Which transport `cache_transceiver_config.backend` means."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import cast

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.kv_transfer.base import StagingTransport

log = logging.getLogger(__name__)

TRANSPORTS = {
    "NIXL": "trtllm_disagg.kv_transfer.nixl:NixlTransport",
    "SHARED_MEMORY": "trtllm_disagg.kv_transfer.shared_memory:SharedMemoryTransport",
}


def create_transport(backend: str) -> StagingTransport:
    """DEFAULT means NIXL, and shared memory where NIXL is not installed. Raises ConfigError for any other name."""
    if backend == "DEFAULT":
        return _default()
    if backend not in TRANSPORTS:
        raise ConfigError.bad_value(
            "cache_transceiver_config.backend",
            backend,
            f"one of DEFAULT, {', '.join(TRANSPORTS)} on the embedded engine",
        )
    try:
        return _create(backend)
    except ImportError as error:
        raise ConfigError(
            f"cache_transceiver_config.backend: {backend} is not installed ({error}); "
            "pip install nixl-cu12==1.5.1, or set SHARED_MEMORY for workers on one host"
        ) from error


def _default() -> StagingTransport:
    try:
        return _create("NIXL")
    except ImportError as error:
        log.warning("NIXL is not installed (%s): KV moves through shared memory, on this host only", error)
        return _create("SHARED_MEMORY")


def _create(name: str) -> StagingTransport:
    module, _, attribute = TRANSPORTS[name].partition(":")
    return cast(StagingTransport, getattr(import_module(module), attribute)())
