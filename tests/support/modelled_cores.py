"""Modelled engines in this process, with a clock that advances only while an engine waits."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.cores import Core
from trtllm_disagg.engines.embedded.core.engine_core import EngineCore
from trtllm_disagg.engines.embedded.tensor_parallel.team import Team
from trtllm_disagg.engines.modelled.build import build_core
from trtllm_disagg.engines.modelled.config import ModelledArgs
from trtllm_disagg.engines.modelled.core import Clock

#: 2 ms per step, 10 us per prompt token, 100 us per decoding sequence.
MEASURED: dict[str, Any] = {
    "step_ms": 2.0,
    "prefill_token_us": 10.0,
    "prefill_context_us": 1.0,
    "decode_token_us": 100.0,
    "decode_context_us": 10.0,
    "kv_pool_tokens": 4096,
    "kv_bytes_per_token": 1000,
}
TOKENS_PER_BLOCK = 32
_CONFIG = {"vocab_size": 258, "max_position_embeddings": 2048, "num_hidden_layers": 4, "model_type": "llama"}


class VirtualClock:
    """For several threads; the waiting one advances it."""

    def __init__(self) -> None:
        self.time = 100.0
        self._lock = threading.Lock()

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        with self._lock:
            self.time = max(self.time, moment)


@functools.cache
def model_directory() -> Path:
    """The files that an engine reads; removed when this process ends."""
    directory = Path(tempfile.mkdtemp(prefix="trtllm-disagg-modelled-"))
    atexit.register(shutil.rmtree, directory)
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    return directory


class ModelledTestCore(Core):
    """A `Core`. `modelled`: overrides of `MEASURED`."""

    def __init__(
        self, clock: Clock | None = None, modelled: dict[str, Any] | None = None, **args: Any
    ) -> None:
        self.clock = clock or VirtualClock()
        defaults: dict[str, Any] = {
            "kv_cache_config": {"event_buffer_max_size": 10_000},
            "max_seq_len": 2048,
            "enable_chunked_prefill": True,
            "cache_transceiver_config": {"backend": "DEFAULT"},
            "modelled": {"measured": MEASURED} | (modelled or {}),
        }
        super().__init__(model_directory(), **(defaults | args))

    def _build(self, args: dict[str, Any], team: Team | None, injected: dict[str, Any]) -> EngineCore:
        return build_core(ModelledArgs(**args), self.woken.set, self.clock)

    def seconds_of(self, prompt: Sequence[int], max_tokens: int) -> list[float]:
        """Time of each token since the request was added."""
        begun = self.clock.now()
        request = self.add(prompt, max_tokens)
        moments: list[float] = []
        while not self.answers[request, 0].done:
            self.step()
            moments += [self.clock.now() - begun] * (len(self.answers[request, 0].tokens) - len(moments))
        return moments


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [5 + (7 * i + salt) % 83 for i in range(length)]
