"""Chooses a request's attention-DP rank, as keyword arguments for the engine. Each rank has its own cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_disagg.engine.llm_api import LlmApi
from trtllm_disagg.errors import ConfigError, InvalidRequestError
from trtllm_disagg.types import GenerateRequest

_AFFINITY = "kv_cache_routing_conversation_affinity"


@dataclass(frozen=True, slots=True)
class Affinity:
    """Whether a conversation stays on one rank, and whether the router or the engine chooses it."""

    is_on: bool = False
    by_router: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Returns the arguments of `generate_async` that place a request; empty if the engine chooses its rank."""

    num_ranks: int
    #: None: the router chooses no rank.
    scheduling_params: Callable[..., Any] | None
    #: The engine keeps a conversation on its first turn's rank; None: it does not.
    conversation_params: Callable[..., Any] | None = None

    def __call__(self, request: GenerateRequest) -> dict[str, Any]:
        """Raises InvalidRequestError for a nonexistent rank."""
        if self.conversation_params is None:
            return self._where_the_router_says(request)
        if request.session_id is None:
            return {}
        conversation = self.conversation_params(conversation_id=request.session_id)
        return {"conversation_params": conversation} | self._where_the_router_says(request)

    def _where_the_router_says(self, request: GenerateRequest) -> dict[str, Any]:
        rank = request.dp_rank
        if rank is None or self.scheduling_params is None:
            return {}
        if not 0 <= rank < self.num_ranks:
            allowed = f"expected 0 to {self.num_ranks - 1}"
            raise InvalidRequestError(f"routing.dp_rank: {rank} is not allowed; {allowed}")
        place = self.scheduling_params(attention_dp_rank=rank, attention_dp_relax=False)
        return {"scheduling_params": place}


def num_ranks_of(args: Any) -> int:
    """The number of attention-DP ranks; 1 without attention DP."""
    return int(args.tensor_parallel_size) if getattr(args, "enable_attention_dp", False) else 1


def placement_of(api: LlmApi, num_ranks: int, affinity: Affinity, args: Any) -> Placement:
    """Raises ConfigError for an `affinity` that the engine does not support."""
    given = getattr(args, "attention_dp_config", None)
    configured = given.get(_AFFINITY) if isinstance(given, dict) else getattr(given, _AFFINITY, None)
    by_router = api.scheduling_params if num_ranks > 1 else None
    if not affinity.is_on and configured is not True:
        return Placement(num_ranks, by_router)
    if api.conversation_params is None:
        key = "--conversation-affinity" if affinity.is_on else f"attention_dp_config.{_AFFINITY}"
        allowed = f"false with this version of {api.name}, which has no ConversationParams"
        raise ConfigError.bad_value(key, True, allowed)
    return Placement(num_ranks, by_router if affinity.by_router else None, api.conversation_params)
