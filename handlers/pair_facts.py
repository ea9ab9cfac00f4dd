"""Knows what this worker's engine and its peers' can take: whether a prompt fits, and how long its answer can get.

Two engines share a request, and either may be too small for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.engine.engine_facts import EngineFacts
from trtllm_disagg.types import GenerateRequest


@dataclass(frozen=True, slots=True)
class PairFacts:
    role: Role
    own: EngineFacts
    #: The facts of each peer in discovery; unknown peers count, with unknown facts.
    peers: Callable[[], Sequence[EngineFacts]] = tuple

    def max_new_tokens(self, request: GenerateRequest) -> int | None:
        """The number of tokens at which the decode engine ends the answer; None if only that engine knows. Of several
        decode workers the roomiest counts, or the answer would end early.
        """
        if self.role is not Role.PREFILL:
            return self.own.room(request)
        rooms = [each.room(request) for each in self.peers()] or [None]
        known = [room for room in rooms if room is not None]
        return max(known) if len(known) == len(rooms) else request.stop.max_tokens

    def fits(self, request: GenerateRequest) -> bool:
        """Whether this worker can answer the request, alone or with a peer."""
        return self.why_not_in_a_pair(request) is None or self.why_not_alone(request) is None

    def why_not_alone(self, request: GenerateRequest) -> str | None:
        """Why this worker alone cannot give the pair's answer: it refuses the prompt, or would end earlier. None: it
        can.
        """
        if (why := self.own.why_unfit(request)) is not None:
            return why
        in_pair, own = self.max_new_tokens(request), self.own.room(request)
        if in_pair is not None and own is not None and own < in_pair:
            return f"max_seq_len {self.own.max_seq_len} would end the answer after {own} tokens instead of {in_pair}"
        return None

    def why_not_in_a_pair(self, request: GenerateRequest) -> str | None:
        """Why no pair can run the request: this engine refuses its phase, or all peers' engines do. None: one can."""
        prefills = self.role is Role.PREFILL
        if (why := self.own.why_unfit(request, computes_prompt=prefills)) is not None:
            return why
        reasons = [each.why_unfit(request, computes_prompt=not prefills) for each in self.peers()]
        return reasons[0] if reasons and None not in reasons else None
