"""What the two sides of a meeting use of the engine core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trtllm_disagg.embedded.ipc.messages import LogprobEntry, TokenOutput
from trtllm_disagg.embedded.kv_cache.block_manager import BlockManager
from trtllm_disagg.embedded.scheduler.scheduler import Scheduler
from trtllm_disagg.embedded.scheduler.sequence import Sequence
from trtllm_disagg.errors import DisaggError


@dataclass(frozen=True, slots=True)
class CoreHooks:
    scheduler: Scheduler
    blocks: BlockManager
    #: Let a sequence wait for its turn, or fail it when it can never fit.
    enqueue: Callable[[Sequence], None]
    #: Make the full blocks of what is computed known to the prefix cache.
    commit: Callable[[Sequence], None]
    #: Append a token, and tell the client.
    accept: Callable[[Sequence, int, LogprobEntry | None], None]
    #: End a sequence, without a word.
    retire: Callable[[Sequence], None]
    #: End a request with an error, whatever it is doing.
    fail: Callable[[int, DisaggError], None]
    emit: Callable[[TokenOutput], None]
    #: Tell the client that a sequence has ended before its time.
    cancelled: Callable[[Sequence], None]
    #: Take blocks out of circulation; the name is of whoever may still write into them.
    quarantine: Callable[[list[int], str], None]
    #: (bytes that came, blocks that were here already).
    count_arrival: Callable[[int, int], None]
    #: Bytes that were written to a decode engine.
    count_push: Callable[[int], None]
