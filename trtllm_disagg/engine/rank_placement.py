"""Chooses the attention-DP rank of a request, as keyword arguments for the engine. Each rank has its own cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_disagg.engine.llm_api import LlmApi
from trtllm_disagg.errors import ConfigError, InvalidRequestError
from trtllm_disagg.types import GenerateRequest

#: The keyword arguments of `generate_async` that place a request. Raises InvalidRequestError for a rank that does not
#: exist.
Place = Callable[[GenerateRequest], dict[str, Any]]

_AFFINITY = "kv_cache_routing_conversation_affinity"


@dataclass(frozen=True, slots=True)
class Affinity:
    """Whether the requests of a conversation stay on one rank, and whether the router or the engine chooses it."""

    is_on: bool = False
    by_router: bool = False


def _anywhere(request: GenerateRequest) -> dict[str, Any]:
    """There is only one rank, or the engine chooses."""
    return {}


def _where_the_router_says(num_ranks: int, scheduling_params: Callable[..., Any]) -> Place:
    """Exactly the rank that the router has chosen by its cache."""

    def place(request: GenerateRequest) -> dict[str, Any]:
        rank = request.dp_rank
        if rank is None:
            return {}
        if not 0 <= rank < num_ranks:
            raise InvalidRequestError(
                f"routing.dp_rank: {rank} is not allowed; expected 0 to {num_ranks - 1}"
            )
        return {"scheduling_params": scheduling_params(attention_dp_rank=rank, attention_dp_relax=False)}

    return place


def _with_its_conversation(conversation_params: Callable[..., Any], first_turn: Place) -> Place:
    """The engine uses the rank of the conversation; `first_turn` places conversations that are new to it."""

    def place(request: GenerateRequest) -> dict[str, Any]:
        if request.session_id is None:
            return {}
        params = conversation_params(conversation_id=request.session_id)
        return {"conversation_params": params} | first_turn(request)

    return place


def num_ranks_of(args: Any) -> int:
    """The number of attention-DP ranks, each with its own requests and cache; 1 without attention DP."""
    return int(args.tensor_parallel_size) if getattr(args, "enable_attention_dp", False) else 1


def placement_of(api: LlmApi, num_ranks: int, affinity: Affinity, args: Any) -> Place:
    """Raises ConfigError for an `affinity` with an engine that does not know conversations."""
    given = getattr(args, "attention_dp_config", None)
    configured = given.get(_AFFINITY) if isinstance(given, dict) else getattr(given, _AFFINITY, None)
    by_router: Place = _anywhere
    if num_ranks > 1 and api.scheduling_params is not None:
        by_router = _where_the_router_says(num_ranks, api.scheduling_params)
    if not affinity.is_on and configured is not True:
        return by_router
    if api.conversation_params is None:
        key = "--conversation-affinity" if affinity.is_on else f"attention_dp_config.{_AFFINITY}"
        raise ConfigError.bad_value(
            key, True, f"false with this version of {api.name}, which has no ConversationParams"
        )
    return _with_its_conversation(api.conversation_params, by_router if affinity.by_router else _anywhere)
