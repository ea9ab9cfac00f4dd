"""Where TensorRT-LLM is harder than its API looks: one switch each, and what a switch does that is more than a check.

The file names are those of TensorRT-LLM's source, below `tensorrt_llm/`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, fields
from typing import Any

from trtllm_disagg.embedded.params.request_params import get_global_disagg_request_id
from trtllm_disagg.engine.trtllm_version import TrtllmVersion


class RequestError(RuntimeError):
    """This request failed; the engine goes on. It has no category (executor/utils.py)."""


class EngineDeadError(RuntimeError):
    """The engine has ended (executor/utils.py)."""


#: What becomes of a KV transfer that failed (_torch/pyexecutor/py_executor.py, and since autumn 2026
#: _torch/disaggregation/orchestration/coordinator.py).
GENERATION_TRANSFER_ERROR = "Error in kv cache transfer for generation requests"
CONTEXT_TRANSFER_ERROR = "Error in kv cache transfer for context requests"
#: The same under attention DP; of kv_transfer_timeout_ms, without and with attention DP; and of a context that one rank
#: sends for all.
OTHER_TRANSFER_ERRORS = (
    "Disagg KV cache transfer error",
    "Request 12 timed out",
    "Request timed out (KV transfer)",
    "Request 12 timed out (KV transfer)",
    "Context KV transfer failed",
    "Context KV transfer was rejected",
)


@dataclass(frozen=True, slots=True)
class HardEdges:
    """Off: as the embedded engine has it."""

    #: `get_stats_async` and `get_kv_cache_events_async` keep the calling thread for up to their timeout before there
    #: is an iterator, which waits as long again for more (executor/proxy.py, executor/rpc_worker_mixin.py, #9980).
    blocks_for_news: bool = False
    #: Without enable_iter_perf_stats or event_buffer_max_size there is nothing, and no error (executor/base_worker.py).
    is_silent_when_off: bool = False
    #: `abort` after the last response is logged and dropped, so KV that no decode fetches stays until
    #: kv_transfer_timeout_ms is over (executor/base_worker.py `abort_request`; measured in ai-dynamo/dynamo#14507).
    keeps_kv_of_ended_requests: bool = False
    #: A request that raised is not `finished`, and to iterate it once more waits for ever (executor/result.py).
    never_finishes_after_error: bool = False
    #: A prompt that is too long is a RequestError: out of `generate_async` above max_num_tokens (llmapi/llm.py
    #: `_check_arguments`), out of the stream from max_seq_len on (executor/base_worker.py `_deduce_max_tokens`).
    has_request_errors_for_length: bool = False
    #: `ctx_info_endpoint` is a string for C++; a list fails where nothing catches it, and the engine's process ends
    #: (disaggregated_params.py, executor/base_worker.py `_enqueue_request`).
    takes_one_endpoint: bool = False
    #: Without a tokenizer (skip_tokenizer_init) a request has to name its end_id (llmapi/llm.py
    #: `_prepare_sampling_params`).
    needs_end_id_without_tokenizer: bool = False
    #: The caller's SamplingParams become the request's: the tokenizer's end_id and pad_id are written into them, and
    #: max_tokens 1 for a prefill (llmapi/llm.py `_prepare_sampling_params`, `generate_async`).
    changes_sampling_params: bool = False
    #: Under attention DP the receiver has to be told the sender's rank (_torch/disaggregation/native/transfer.py).
    needs_ctx_dp_rank: bool = False
    #: The answer to a prefill tells its id as ctx_request_id alone (executor/result.py), and the Python transceiver
    #: finds KV by disagg_request_id (_torch/disaggregation/base/transfer.py `get_unique_rid`).
    tells_ctx_request_id_alone: bool = False
    #: KV that a decode has fetched, or that its timeout has ended, is let go of in a step, and the engine takes none
    #: without a request, so the last statistic still counts it (tests/unittest/llmapi/test_llm_pytorch.py sends a
    #: request behind the timeout, and finds no block used in the one statistic of that).
    counts_kv_in_steps: bool = False
    #: What the engine's process has died of is raised out of the next call, of whichever kind it is; those behind it
    #: are told that the LLM is shutting down (executor/executor.py `_handle_background_error`).
    raises_what_it_died_of: bool = False
    #: `_check_health` of a dead engine raises (executor/proxy.py hands on what the background threads met).
    raises_when_unhealthy: bool = False
    #: `abort` is a message to the engine's process, which its rank does not take once it is dead (executor/proxy.py
    #: `abort_request`, executor/ipc.py).
    blocks_aborts_when_dead: bool = False


FORGIVING = HardEdges()
PESSIMISTIC = HardEdges(**{edge.name: True for edge in fields(HardEdges)})


# -- events and statistics

_POLL_SECONDS = 0.1


class News:
    """All readers share one queue (executor/executor.py keeps one IterationResult of each kind)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: deque[dict[str, Any]] = deque()

    def take(self, made: list[dict[str, Any]], timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        """The records so far; the iterator waits only when there are none."""
        self._fetch(made)
        return self._items(0 if self._queue else timeout)

    def block_and_take(
        self, made: list[dict[str, Any]], timeout: float | None
    ) -> AsyncIterator[dict[str, Any]]:
        """Blocks the thread: the worker process is asked every 0.1 s until it has something."""
        until = time.monotonic() + (timeout or 0)
        while not made and (left := until - time.monotonic()) > 0:
            time.sleep(min(_POLL_SECONDS, left))
        self._fetch(made)
        return self._items(timeout)

    def _fetch(self, made: list[dict[str, Any]]) -> None:
        self._queue.extend(made)
        made.clear()

    async def _items(self, timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        while True:
            while self._queue:
                yield self._queue.popleft()
            if timeout == 0:
                return
            await asyncio.sleep(3600 if timeout is None else timeout)
            if not self._queue:
                return


# -- KV of finished prefills


@dataclass(frozen=True, slots=True)
class Meeting:
    """The two phases of one GENERATION_FIRST request. An abort sets them too, so that nothing waits on."""

    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    sent: asyncio.Event = field(default_factory=asyncio.Event)


class KvHolder:
    """Where KV waits for a decode. This one is for worker processes: a decode needs only the handoff's fields."""

    def meeting(self, request_id: int | None) -> Meeting:
        raise NotImplementedError("the recording engine has no GENERATION_FIRST")

    def hold(self, prompt: list[int], owner: object, seconds: float | None) -> bytes:
        return b"nothing: the recording engine has no KV"

    def release(self, name: bytes) -> None:
        """There is nothing."""

    def take(self, name: bytes | None, prompt: list[int]) -> None:
        """It counts as there."""

    def held_by(self, owner: object) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _Held:
    prompt: list[int]
    owner: object
    until: float


class KvStore(KvHolder):
    """Prompts by opaque state, for two workers of a test in one process."""

    def __init__(self) -> None:
        self._held: dict[bytes, _Held] = {}
        self._names = itertools.count(1)
        self._meetings: dict[int | None, Meeting] = {}

    def meeting(self, request_id: int | None) -> Meeting:
        """The same for both phases."""
        return self._meetings.setdefault(request_id, Meeting())

    def hold(self, prompt: list[int], owner: object = None, seconds: float | None = None) -> bytes:
        """`seconds` None: for ever."""
        name = f"kv-{next(self._names)}".encode()
        until = float("inf") if seconds is None else time.monotonic() + seconds
        self._held[name] = _Held(prompt, owner, until)
        return name

    def release(self, name: bytes) -> None:
        self._held.pop(name, None)

    def take(self, name: bytes | None, prompt: list[int]) -> None:
        """Move the KV to the decode side. Raises RequestError for KV that is gone, or of another prompt."""
        self._expire()
        held = None if name is None else self._held.pop(name, None)
        if held is None or held.prompt != prompt:
            raise RequestError(GENERATION_TRANSFER_ERROR)

    def held_by(self, owner: object) -> int:
        self._expire()
        return sum(held.owner is owner for held in self._held.values())

    def __len__(self) -> int:
        self._expire()
        return len(self._held)

    def clear(self) -> None:
        self._held.clear()
        self._meetings.clear()

    def _expire(self) -> None:
        now = time.monotonic()
        for name in [name for name, held in self._held.items() if held.until <= now]:
            del self._held[name]


# -- versions


#: llmapi/disagg_utils.py: the first release that may have the function (`llm_api/1.2.0rc.json` has none), and the first
#: that splits its argument in two.
FIRST_WITH_GLOBAL_IDS = TrtllmVersion.parse("1.3.0rc1")
FIRST_WITH_PROCESS_ID = TrtllmVersion.parse("1.3.0rc22")


def _id_of_machine(machine_id: int) -> int:
    """Ten bits, as it was before there were processes."""
    if not 0 <= machine_id < 1 << 10:
        raise ValueError(f"machine_id must be in [0, 1024), got {machine_id}")
    return get_global_disagg_request_id(*divmod(machine_id, 64))


def global_id_function(version: str) -> Callable[..., int] | None:
    """`get_global_disagg_request_id` of llmapi/disagg_utils.py; None in a release without it."""
    wanted = TrtllmVersion.parse(version, "version")
    if wanted < FIRST_WITH_GLOBAL_IDS:
        return None
    return _id_of_machine if wanted < FIRST_WITH_PROCESS_ID else get_global_disagg_request_id
