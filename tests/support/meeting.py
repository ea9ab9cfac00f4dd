"""Two engine cores in this process for GENERATION_FIRST requests, stepped alternately."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.cores import Answer, Core
from trtllm_disagg.engines.embedded.ipc.messages import Rendezvous, SamplingSpec

HANG_SECONDS = 10.0
_ids = itertools.count(1 << 40)


@dataclass
class Met:
    """One request on both engines."""

    prompt: list[int]
    meeting: Rendezvous
    prefill: int | None = None
    decode: int | None = None


@dataclass
class Duo:
    """`prefill` and `decode`; a test adds requests to each separately."""

    prefill: Core
    decode: Core
    seconds: float = HANG_SECONDS
    met: list[Met] = field(default_factory=list)

    def request(self, prompt: Sequence[int]) -> Met:
        self.met.append(Met(list(prompt), Rendezvous(next(_ids), self.prefill.engine.connector.endpoint)))
        return self.met[-1]

    def add_prefill(self, met: Met, sampling: SamplingSpec | None = None, **more: Any) -> int:
        met.prefill = self.prefill.add(
            met.prompt,
            1,
            sampling=sampling,
            request_type="context_only",
            rendezvous=Rendezvous(met.meeting.request),
            **more,
        )
        return met.prefill

    def add_decode(
        self, met: Met, max_tokens: int = 8, sampling: SamplingSpec | None = None, **more: Any
    ) -> int:
        met.decode = self.decode.add(
            met.prompt,
            max_tokens,
            sampling=sampling,
            request_type="generation_only",
            rendezvous=met.meeting,
            **more,
        )
        return met.decode

    def both(self, prompt: Sequence[int], max_tokens: int = 8) -> Met:
        met = self.request(prompt)
        self.add_prefill(met)
        self.add_decode(met, max_tokens)
        return met

    def answer(self, met: Met) -> Answer:
        """Decode's answer."""
        assert met.decode is not None
        return self.decode.answers[met.decode, 0]

    def generate(self, prompt: Sequence[int], max_tokens: int = 8) -> list[int]:
        met = self.both(prompt, max_tokens)
        self.run()
        assert self.answer(met).error is None, self.answer(met).error
        return self.answer(met).tokens

    def step(self) -> None:
        for core in (self.prefill, self.decode):
            core.step()

    def run(self) -> None:
        """Run until every request is done on both engines."""
        self.run_until(
            lambda: all(a.done for core in (self.prefill, self.decode) for a in core.answers.values())
        )

    def run_until(self, is_enough: Callable[[], bool]) -> None:
        end = time.monotonic() + self.seconds
        while not is_enough():
            assert time.monotonic() < end, f"an engine hangs: {self._undone()}"
            self.step()
            if not self.prefill.engine.has_work and not self.decode.engine.has_work:
                # Both wait for other threads, which may wake either.
                self.prefill.woken.wait(0.001)
                self.prefill.woken.clear()

    def _undone(self) -> str:
        sides = {"prefill": self.prefill, "decode": self.decode}
        return "; ".join(
            f"{name}: requests {[i for (i, _), answer in core.answers.items() if not answer.done]}, "
            f"waiting {len(core.engine.scheduler.waiting)}, running {len(core.engine.scheduler.running)}, "
            f"receiving {len(core.engine.scheduler.receiving)}, {core.free_blocks} blocks free, "
            f"{core.engine.num_active} active"
            for name, core in sides.items()
        )

    def assert_idle(self) -> None:
        """Neither engine holds anything."""
        self.run_until(lambda: not self.prefill.engine.num_active and not self.decode.engine.num_active)
        for core in (self.prefill, self.decode):
            core.assert_idle()

    def close(self) -> None:
        for core in (self.prefill, self.decode):
            core.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for other threads."""
    end = time.monotonic() + HANG_SECONDS
    while not is_so():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)
