"""What this worker's engine and those of its peers can take: whether a prompt fits, and how long its answer gets.

Two engines share a request, and either may be too small for it. Only this module knows both, so only it is asked.
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
    #: Those of the peers in discovery; an unknown one counts, with facts that are not known.
    peers: Callable[[], Sequence[EngineFacts]] = tuple

    def most_tokens(self, request: GenerateRequest) -> int | None:
        """The number of tokens that end the answer on the engine that decodes it; None where only that engine knows.
        Of several decode workers it is the one with the most room: an answer must not be taken for complete too early.
        """
        if self.role is not Role.PREFILL:
            return self.own.room(request)
        rooms = [each.room(request) for each in self.peers()] or [None]
        known = [room for room in rooms if room is not None]
        return max(known) if len(known) == len(rooms) else request.stop.max_tokens

    def fits(self, request: GenerateRequest) -> bool:
        """Whether this worker can answer it, alone or with a peer."""
        return self.why_not_in_a_pair(request) is None or self.why_not_alone(request) is None

    def why_not_alone(self, request: GenerateRequest) -> str | None:
        """Why this worker cannot do both phases as the pair does them: it refuses the prompt, or its answer would end
        earlier. None when it can.
        """
        if (why := self.own.why_unfit(request)) is not None:
            return why
        most, own = self.most_tokens(request), self.own.room(request)
        if most is not None and own is not None and own < most:
            return f"max_seq_len {self.own.max_seq_len} would end the answer after {own} tokens instead of {most}"
        return None

    def why_not_in_a_pair(self, request: GenerateRequest) -> str | None:
        """Why this worker and a peer cannot share the request: this engine refuses its phase, or all peers' do."""
        prefills = self.role is Role.PREFILL
        if (why := self.own.why_unfit(request, computes_prompt=prefills)) is not None:
            return why
        reasons = [each.why_unfit(request, computes_prompt=not prefills) for each in self.peers()]
        return reasons[0] if reasons and None not in reasons else None
