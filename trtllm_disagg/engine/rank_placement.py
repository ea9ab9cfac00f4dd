"""Chooses the attention-DP rank of a request, as keyword arguments for the engine. Each rank has its own cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_disagg.engine.llm_api import LlmApi
from trtllm_disagg.errors import ConfigError, InvalidRequestError
from trtllm_disagg.types import GenerateRequest

Keywords = dict[str, Any]

_AFFINITY = "kv_cache_routing_conversation_affinity"


@dataclass(frozen=True, slots=True)
class Affinity:
    """Whether the requests of a conversation stay on one rank, and whether the router or the engine chooses it."""

    is_on: bool = False
    by_router: bool = False


class Placement:
    """The base class: there is only one rank, or the engine chooses."""

    def keywords(self, request: GenerateRequest) -> Keywords:
        """Keyword arguments for `generate_async`. Raises InvalidRequestError for a rank that does not exist."""
        return {}


@dataclass(frozen=True, slots=True)
class RankOfRouter(Placement):
    """Uses exactly the rank that the router has chosen by its cache."""

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
    """The engine uses the rank of the conversation; `first_turn` places conversations that are new to it."""

    conversation_params: Callable[..., Any]
    first_turn: Placement

    def keywords(self, request: GenerateRequest) -> Keywords:
        if request.session_id is None:
            return {}
        params = self.conversation_params(conversation_id=request.session_id)
        return {"conversation_params": params} | self.first_turn.keywords(request)


def num_ranks_of(args: Any) -> int:
    """The number of attention-DP ranks, each with its own requests and cache; 1 without attention DP."""
    return int(args.tensor_parallel_size) if getattr(args, "enable_attention_dp", False) else 1


def placement_of(api: LlmApi, num_ranks: int, affinity: Affinity, args: Any) -> Placement:
    """Raises ConfigError for an `affinity` with an engine that does not know conversations."""
    given = getattr(args, "attention_dp_config", None)
    configured = given.get(_AFFINITY) if isinstance(given, dict) else getattr(given, _AFFINITY, None)
    scheduling = api.scheduling_params
    of_router = (
        RankOfRouter(num_ranks, scheduling) if num_ranks > 1 and scheduling is not None else Placement()
    )
    if not affinity.is_on and configured is not True:
        return of_router
    if api.conversation_params is None:
        key = "--conversation-affinity" if affinity.is_on else f"attention_dp_config.{_AFFINITY}"
        raise ConfigError.bad_value(
            key, True, f"false with this version of {api.name}, which has no ConversationParams"
        )
    first_turn = of_router if affinity.by_router else Placement()
    return RankOfConversation(api.conversation_params, first_turn)
