"""Engine cores in this process, stepped as in their own."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from trtllm_disagg.engines.embedded.connector.two_sided import TwoSidedConnector
from trtllm_disagg.engines.embedded.core import build
from trtllm_disagg.engines.embedded.core.engine_core import EngineCore
from trtllm_disagg.engines.embedded.ipc.messages import (
    AddRequest,
    LogprobEntry,
    MadeHandoff,
    ReceivedHandoff,
    SamplingSpec,
    TokenOutput,
)
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.tensor_parallel.team import Team

_HANG_SECONDS = 20.0


@dataclass
class Answer:
    """All of the engine's output for one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    prompt_logprobs: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    category: str | None = None
    cached_tokens: int = 0
    handoff: MadeHandoff | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def add(self, output: TokenOutput) -> None:
        assert not self.done, "said more after its end"
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs
        if output.trim:
            del self.tokens[-output.trim :]
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.error, self.handoff = output.error, output.handoff
        self.category = output.error_category if output.error else None
        self.cached_tokens = output.cached_tokens


class Core:
    """`add` requests, `run` until they are done. Fails rather than hangs."""

    def __init__(self, model: Path, **args: Any) -> None:
        team: Team | None = args.pop("team", None)
        injected: dict[str, Any] = {name: args.pop(name, None) for name in ("transport", "timeouts")}
        settings: dict[str, Any] = {
            "model": model,
            "kv_cache_config": {"max_tokens": 1024, "event_buffer_max_size": 10_000},
            "max_seq_len": 512,
            "max_batch_size": 8,
            "max_num_tokens": 1024,
            "enable_iter_perf_stats": True,
        }
        self.woken = threading.Event()
        self.engine = self._build(settings | args, team, injected)
        self.answers: dict[tuple[int, int], Answer] = {}
        self.events: list[dict[str, Any]] = []
        self.stats: list[dict[str, Any]] = []
        self._ids = itertools.count(1)

    def _build(self, args: dict[str, Any], team: Team | None, injected: dict[str, Any]) -> EngineCore:
        """`injected`: a transport or timeouts in place of those of `args`."""
        transport, timeouts = injected["transport"], injected["timeouts"]
        with contextlib.ExitStack() as patches:
            if transport is not None:
                patches.enter_context(mock.patch.object(build, "transport_of", return_value=transport))
            if timeouts is not None:
                patches.enter_context(mock.patch.object(build, "timeouts_of", return_value=timeouts))
            return build.build_core(LlmArgs(**args), self.woken.set, team)

    # -- requests

    def add(self, prompt: Sequence[int], max_tokens: int = 8, *, choices: int = 1, **more: Any) -> int:
        request_id = next(self._ids)
        sampling = more.pop("sampling", None) or SamplingSpec(max_tokens=max_tokens)
        request = AddRequest(
            request_id=request_id,
            prompt=list(prompt),
            sampling=sampling,
            request_type=more.pop("request_type", "context_and_generation"),
            num_choices=choices,
            **more,
        )
        for index in range(choices):
            self.answers[request_id, index] = Answer()
        self.engine.add(request)
        return request_id

    def prefill(self, prompt: Sequence[int], sampling: SamplingSpec | None = None) -> MadeHandoff:
        sampling = msgspec.structs.replace(sampling or SamplingSpec(max_tokens=1), max_tokens=1)
        answer = self.run(self.add(prompt, sampling=sampling, request_type="context_only"))
        assert answer.handoff is not None, answer
        return answer.handoff

    def add_decode(
        self,
        prompt: Sequence[int],
        handoff: MadeHandoff,
        max_tokens: int = 8,
        *,
        opaque_state: bytes | None = None,
        logprobs: list[LogprobEntry] | None = None,
        **more: Any,
    ) -> int:
        received = ReceivedHandoff(opaque_state or handoff.opaque_state, handoff.first_gen_tokens, logprobs)
        return self.add(prompt, max_tokens, request_type="generation_only", handoff=received, **more)

    def generate(self, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> list[int]:
        answer = self.run(self.add(prompt, max_tokens, **more))
        assert answer.error is None, answer.error
        return answer.tokens

    # -- the loop

    def step(self) -> list[TokenOutput]:
        report = self.engine.step()
        for output in report.outputs:
            self.answers[output.request_id, output.index].add(output)
        self.events += report.events
        self.stats += report.stats
        self.engine.blocks.check()
        return report.outputs

    def run(self, *request_ids: int) -> Answer:
        """Run until these requests are done; the first one's answer."""
        wanted = [answer for (request_id, _), answer in self.answers.items() if request_id in request_ids]
        while not all(answer.done for answer in wanted):
            self.wait()
            self.step()
        return self.answers[request_ids[0], 0]

    def wait(self) -> None:
        """Sleep exactly when the engine's process would."""
        if not self.engine.has_work:
            deadline = self.engine.seconds_to_deadline()
            woken = self.woken.wait(_HANG_SECONDS if deadline is None else min(deadline, _HANG_SECONDS))
            assert woken or deadline is not None, "the engine sleeps for ever"
        self.woken.clear()

    def settle(self) -> None:
        """Run until no lease or pull is left."""
        end = time.monotonic() + _HANG_SECONDS
        while self.engine.num_active:
            assert time.monotonic() < end, "a lease or a pull is left"
            self.wait()
            self.step()
        self.step()

    # -- accounting

    @property
    def connector(self) -> TwoSidedConnector:
        assert isinstance(self.engine.connector, TwoSidedConnector)
        return self.engine.connector

    @property
    def free_blocks(self) -> int:
        return self.engine.blocks.num_available

    def assert_idle(self) -> None:
        """Nothing runs, waits or is held; every block is free."""
        self.settle()
        assert self.engine.connector.num_leases == 0
        assert self.free_blocks == self.engine.blocks.num_blocks - self.engine.blocks.num_quarantined
        assert not self.engine.has_work

    def close(self) -> None:
        self.engine.close()
