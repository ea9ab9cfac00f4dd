"""The engine core's loop around a cheap, deterministic simulated model, which fails if KV is wrong."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.engines.embedded.kv_cache.pool import KvPool
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.scheduler.scheduler import Row, Scheduler, create_blocks
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence, Status
from trtllm_disagg.wire.kv_handle import VERSION, KvHandle

SIZE = 16
TILE = 32
#: Tokens of answers only, so that no prompt matches KV of decoding.
FIRST_OUTPUT = 1000
HANDLE = KvHandle(VERSION, "prefill", "tcp://127.0.0.1:1", b"l" * 16, b"y" * 16, b"p" * 16, 1, [0], 0)
_PRIME = 2**31 - 1


def sequence(
    request_id: int, num_prompt: int, max_tokens: int = 4, *, handle: KvHandle | None = None, **more: Any
) -> Sequence:
    return Sequence(
        request_id=request_id,
        index=0,
        request_type=more.pop("request_type", "generation_only" if handle else "context_and_generation"),
        tokens=more.pop("prompt", [request_id] * num_prompt),
        num_prompt=num_prompt,
        sampling=SamplingSpec(max_tokens=max_tokens),
        seed=0,
        handle=handle,
        **more,
    )


class SimulatedModel:
    """A position's KV is a number made of its token and all KV before; prefill and decode round differently."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.kv = torch.full((num_blocks, 1, 2, tokens_per_block, 1, 1), -1.0, dtype=torch.float64)
        self._keys = self.kv[:, 0, 0, :, 0, 0].numpy()
        self._size = tokens_per_block

    def spoil(self, blocks: list[int]) -> None:
        """Overwrite free blocks, which must not be read."""
        self.kv[blocks] = -1.0

    def run(self, row: Row) -> int:
        """The token after the row's last position."""
        s = row.sequence
        end = s.num_computed + row.num_tokens
        return self.compute(s.tokens[:end], s.blocks, s.num_computed, 1 if s.in_prefill else 2)

    def compute(self, tokens: list[int], blocks: list[int], begin: int, rounding: int) -> int:
        positions = np.arange(len(tokens))
        places = np.asarray(blocks)[positions // self._size], positions % self._size
        known = tuple(index[:begin] for index in places)
        total = int(self._keys[known].sum())
        for position in range(begin, len(tokens)):
            value = (total * 31 + tokens[position] * 7 + position + rounding) % _PRIME
            self._keys[places[0][position], places[1][position]] = value
            total += value
        return FIRST_OUTPUT + total % 997


@dataclass
class Engine:
    """`step` checks the invariants of every step."""

    num_blocks: int = 16
    tokens_per_block: int = SIZE
    args: dict[str, Any] = field(default_factory=dict)
    alignment: int = TILE

    def __post_init__(self) -> None:
        defaults: dict[str, Any] = {"model": "m", "max_batch_size": 8, "max_num_tokens": 64}
        args = LlmArgs(**(defaults | {"enable_chunked_prefill": True} | self.args))
        self.max_num_tokens = args.max_num_tokens
        args.kv_cache_config.tokens_per_block = self.tokens_per_block
        args.kv_cache_config.event_buffer_max_size = 100_000
        self.blocks = create_blocks(args.kv_cache_config, self.num_blocks, 64)
        self.events = self.blocks.events
        self.model = SimulatedModel(self.num_blocks, self.tokens_per_block)
        self.memory = KvPool(self.model.kv)
        self.scheduler = Scheduler(args, self.blocks, self.memory, self.alignment)
        self.finished: list[int] = []
        self.answers: dict[int, list[int]] = {}
        self.receiving: list[Sequence] = []
        self.leased: list[list[int]] = []

    def step(self) -> list[Row]:
        self.model.spoil(list(self.blocks.free_blocks))
        self.receiving += self.scheduler.admit()
        rows = self.scheduler.schedule()
        self._check(rows)
        tokens = [self.model.run(row) for row in rows]
        sampling = [(row.sequence, token) for row, token in zip(rows, tokens, strict=True) if row.samples]
        for row in rows:
            s = row.sequence
            s.num_computed += row.num_tokens
            self.commit(s)
        for s, token in sampling:
            self.accept(s, token)
        self.blocks.check()
        return rows

    def _check(self, rows: list[Row]) -> None:
        decoding = [s for s in self.scheduler.running if not s.in_prefill]
        assert [row.sequence for row in rows[: len(decoding)]] == decoding, (
            "decode rows come first, all of them"
        )
        assert all(row.num_tokens == 1 for row in rows[: len(decoding)])
        assert all(row.sequence.in_prefill for row in rows[len(decoding) :])
        assert sum(row.num_tokens for row in rows) <= self.max_num_tokens
        for row in rows:
            s = row.sequence
            end = s.num_computed + row.num_tokens
            assert row.num_tokens > 0
            assert end in (s.num_prompt, len(s.tokens)) or not s.in_prefill or end % self.alignment == 0, (
                "a chunk that goes on later ends on a tile"
            )
            assert row.samples == (end == len(s.tokens)), "only the end of what is known is sampled from"
            assert end <= len(s.blocks) * self.tokens_per_block, "a token without a block"

    def commit(self, s: Sequence) -> None:
        self.blocks.commit(s.tokens[: s.num_computed], s.blocks, s.keys, s.salt)

    def receive(self, *, fails: bool = False) -> None:
        """End the oldest pull."""
        s = self.receiving.pop(0)
        if fails or s.aborted:
            self.retire(s)
            return
        begin = len(s.keys) * self.tokens_per_block
        token = self.model.compute(s.tokens, s.blocks, begin, 1)
        s.num_computed = s.num_prompt
        self.commit(s)
        self.scheduler.received(s)
        self.accept(s, token)

    def accept(self, s: Sequence, token: int) -> None:
        s.tokens.append(token)
        if s.is_context_only:
            self.scheduler.finish(s)
            self.leased.append(s.blocks)
            self._end(s)
        elif s.num_output >= s.sampling.max_tokens:
            self.retire(s)
            self._end(s)

    def _end(self, s: Sequence) -> None:
        self.finished.append(s.request_id)
        self.answers[s.request_id] = s.output

    def abort(self, request_id: int) -> None:
        for s in self.scheduler.find(request_id):
            if s.status is Status.RECEIVING:
                s.aborted = True
            else:
                self.retire(s)

    def retire(self, s: Sequence) -> None:
        self.scheduler.finish(s)
        self.blocks.release(s.blocks)
        s.blocks = []

    def end_lease(self) -> None:
        self.blocks.release(self.leased.pop(0))

    def drain(self, max_steps: int = 20_000) -> None:
        """Run until no sequence is left. Pulls end only when nothing else can run."""
        # `has_runnable` must be true while something can run, or the engine's process would sleep.
        for _ in range(max_steps):
            if self.scheduler.has_runnable:
                self.step()
            elif self.receiving:
                self.receive()
            elif self.leased:
                self.end_lease()
            else:
                break
        assert self.scheduler.unfinished() == [], "left behind"


@functools.cache
def solo(prompt: tuple[int, ...], max_tokens: int, size: int) -> list[int]:
    """The answer alone, unchunked, in a large enough pool."""
    engine = Engine(64, size, {"max_num_tokens": 1024, "kv_cache_config": {"enable_block_reuse": False}})
    engine.scheduler.add(sequence(0, len(prompt), max_tokens, prompt=list(prompt)))
    engine.drain()
    return engine.answers[0]
