"""Which rank of attention DP runs a request: what the engine is told of it. Each rank has a cache of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_disagg.errors import InvalidRequestError
from trtllm_disagg.types import GenerateRequest

Keywords = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Affinity:
    """Whether the requests of a conversation stay on one rank, and whether the router chooses it, or the engine."""

    is_on: bool = False
    by_router: bool = False


class Placement:
    """As it is, there is one rank and nothing to choose, or the engine chooses."""

    def keywords(self, request: GenerateRequest) -> Keywords:
        """For `generate_async`. Raises InvalidRequestError for a rank that there is not."""
        return {}


@dataclass(frozen=True, slots=True)
class RankOfRouter(Placement):
    """The rank that the router has chosen for its cache, and no other one."""

    num_ranks: int
    scheduling_params: Callable[..., Any]

    def keywords(self, request: GenerateRequest) -> Keywords:
        rank = request.dp_rank
        if rank is None:
            return {}
        if not 0 <= rank < self.num_ranks:
            raise InvalidRequestError(
                f"routing.dp_rank: {rank} is not allowed; expected 0 to {self.num_ranks - 1}"
            )
        params = self.scheduling_params(attention_dp_rank=rank, attention_dp_relax=False)
        return {"scheduling_params": params}


@dataclass(frozen=True, slots=True)
class RankOfConversation(Placement):
    """The engine knows on which rank the conversation was; `first_turn` places those that it does not know."""

    conversation_params: Callable[..., Any]
    first_turn: Placement

    def keywords(self, request: GenerateRequest) -> Keywords:
        if request.session_id is None:
            return {}
        params = self.conversation_params(conversation_id=request.session_id)
        return {"conversation_params": params} | self.first_turn.keywords(request)
