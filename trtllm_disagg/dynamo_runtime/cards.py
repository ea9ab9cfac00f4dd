"""Puts and removes the cards that describe a worker's model in discovery."""

from __future__ import annotations

from typing import Any, NamedTuple

from dynamo.common.token_budget import TokenBudget, publish_token_budget
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model, unregister_model

from trtllm_disagg.config.settings import names_of_endpoint_types
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.advertised import Advertised, Taints
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime, ServedModel


class CardType(NamedTuple):
    """How a frontend treats a card."""

    model_type: Any
    worker_type: Any
    #: The worker types that the frontend requires to serve the model.
    needs: list[list[Any]]


def card_type_for_frontends(config: WorkerConfig) -> CardType:
    """A first stage registers as an aggregated worker: the frontend routes by its cache and calls no second stage."""
    served = ModelType.Empty
    for name in names_of_endpoint_types(config.endpoint_types):
        served = served | _MODEL_TYPES[name]
    if config.role is Role.AGG or config.strategy_spec.entry_role is not None:
        return CardType(served, WorkerType.Aggregated, [])
    if config.role is Role.PREFILL:
        return CardType(ModelType.Prefill, WorkerType.Prefill, [[WorkerType.Decode]])
    return CardType(served, WorkerType.Decode, [[WorkerType.Prefill]])


_MODEL_TYPES = {"chat": ModelType.Chat, "completions": ModelType.Completions, "none": ModelType.Empty}

#: The card of a second stage, which makes KvRouters listen to its cache events (not under WorkerType.Decode). With this
#: type the frontend neither routes requests to it nor counts the model as served without a first stage. Measured for
#: both roles (docs/log/dynamo.md).
_UNROUTED = CardType(ModelType.Empty, WorkerType.Prefill, [[WorkerType.Aggregated]])


class Cards:
    """A worker's cards for frontends and the other role's KV routers. After `close` no card is put.

    One more card closes this namespace: then other namespaces of the model get all new requests. It has its own
    endpoint, a type that no worker here routes by, and needs that no worker meets (docs/log/dynamo.md).
    """

    def __init__(
        self, config: WorkerConfig, runtime: Runtime, advertised: Advertised, model: ServedModel
    ) -> None:
        self.card_type = card_type_for_frontends(config)
        self.are_at_frontends = False
        self._are_for_peers = self._is_closed = self._has_closed_namespace = False
        self._config, self._model, self._advertised = config, model, advertised
        self._runtime = runtime
        self._closing = runtime.endpoint(f"{config.frontend_endpoint_id}_closed")
        self._taints = Taints(runtime, runtime.endpoint_for_frontends, advertised.taints)

    async def put_at_frontends(self) -> None:
        await self._put(self._runtime.endpoint_for_frontends, self.card_type, self._config.publish_kv_events)
        self.are_at_frontends = not self._is_closed

    async def remove_from_frontends(self) -> None:
        await unregister_model(self._runtime.endpoint_for_frontends)
        self.are_at_frontends = False

    async def put_for_peers(self) -> None:
        """Make the other role's KV routers listen to this worker's cache events."""
        self._are_for_peers = not self._is_closed
        await self._put(self._runtime.endpoint_for_workers, _UNROUTED, True)
        if self._is_closed:  # meanwhile
            await self.remove_for_peers()

    async def remove_for_peers(self) -> None:
        await unregister_model(self._runtime.endpoint_for_workers)
        self._are_for_peers = False

    async def close(self) -> None:
        """Remove the card for peers, and put no more. The frontends' card ends with the runtime."""
        self._is_closed = True
        if self._are_for_peers:
            await self.remove_for_peers()

    async def close_namespace(self) -> None:
        self._has_closed_namespace = True
        by = WorkerType.Aggregated if self.card_type.needs else WorkerType.Prefill
        await self._put(self._closing, CardType(ModelType.Empty, by, [[WorkerType.Encode]]), False)

    async def open_namespace(self) -> None:
        """Undo `close_namespace`, if done."""
        if self._has_closed_namespace:
            await unregister_model(self._closing)
            self._has_closed_namespace = False

    async def _put(self, endpoint: Any, card_type: CardType, publishes_events: bool) -> None:
        if self._is_closed:
            return
        config, model = self._config, self._model
        card = ModelRuntimeConfig()
        card.total_kv_blocks = model.num_blocks
        card.max_num_seqs = model.max_batch_size
        card.max_num_batched_tokens = model.max_num_tokens
        if model.max_seq_len is not None:
            card.context_length = model.max_seq_len
            # The frontend refuses a longer prompt with 400, before a stream would begin with 200.
            publish_token_budget(card, TokenBudget(model.max_seq_len, True, False))
        card.data_parallel_size = model.num_ranks
        card.kv_event_publishing_enabled = publishes_events
        card.enable_local_indexer = True
        if endpoint is self._runtime.endpoint_for_frontends:
            card.kv_state_endpoint = config.kv_state_endpoint
            self._taints.put_on(card)
        self._advertised.put_on(card)
        await register_model(
            ModelInput.Tokens,
            card_type.model_type,
            endpoint,
            config.model,
            config.model_name,
            worker_type=card_type.worker_type,
            needs=card_type.needs,
            kv_cache_block_size=model.block_size,
            runtime_config=card,
            custom_template_path=config.custom_jinja_template,
            ignore_weights=True,
            router_config=self._advertised.router,
        )
