"""Everything of Dynamo's runtime that a worker uses. Only this module and `publisher/` import `dynamo`."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from dynamo.common.utils.graceful_shutdown import install_signal_handlers
from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.llm import exceptions as dynamo_errors
from dynamo.runtime import DistributedRuntime

from trtllm_disagg import errors
from trtllm_disagg.config import Role, Strategy, WorkerConfig, parse_endpoint_id
from trtllm_disagg.types import Generate, RequestContext
from trtllm_disagg.wire import decode_request, encode_chunk

log = logging.getLogger(__name__)

_DESCRIBE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the frontend's model card says about this worker's engine."""

    block_size: int
    num_blocks: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int


class Runtime:
    """This worker's place in a Dynamo deployment."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._runtime = DistributedRuntime(
            asyncio.get_running_loop(),
            config.discovery_backend,
            config.request_plane,
            event_plane=config.event_plane,
        )
        self.endpoint = self._runtime.endpoint(parse_endpoint_id(config.endpoint_id).dotted)
        self.instance_id: int = self.endpoint.connection_id()
        self._clients: dict[str, Any] = {}
        self._told_to_stop = False

    async def second_stage(self, endpoint_id: str) -> DynamoStageClient | None:
        """A client of the other stage, once an instance of it is there; None when told to stop before."""
        client = await self._client(endpoint_id)
        log.info("waiting for the second stage at %s", endpoint_id)
        try:
            await client.wait_for_instances()
        except Exception:
            if self._told_to_stop:
                return None
            raise
        return DynamoStageClient(client)

    async def partners(self, endpoint_id: str) -> list[dict[str, Any]]:
        """What those who are at an endpoint now say of themselves. Who does not answer is left out."""
        client = await self._client(endpoint_id)
        answers: list[dict[str, Any]] = []
        for instance_id in client.instance_ids():
            with suppress(Exception):
                async with asyncio.timeout(_DESCRIBE_SECONDS):
                    async for item in await client.direct({_DESCRIBE: True}, instance_id):
                        answers.append(item.data())
        return answers

    async def _client(self, endpoint_id: str) -> Any:
        """One for each endpoint: every one watches the discovery directory, and a user may have 128 watches."""
        if endpoint_id not in self._clients:
            endpoint = self._runtime.endpoint(parse_endpoint_id(endpoint_id).dotted)
            self._clients[endpoint_id] = await endpoint.client()
        return self._clients[endpoint_id]

    async def register(self, model: ServedModel) -> None:
        """Make this worker known to the frontend."""
        config = self._config
        card = ModelRuntimeConfig()
        card.total_kv_blocks = model.num_blocks
        card.max_num_seqs = model.max_batch_size
        card.max_num_batched_tokens = model.max_num_tokens
        card.context_length = model.max_seq_len
        card.kv_event_publishing_enabled = config.publish_kv_events
        card.enable_local_indexer = True
        card.tool_call_parser = config.tool_call_parser
        card.reasoning_parser = config.reasoning_parser
        model_type, worker_type, needs = _registration(config)
        await register_model(
            ModelInput.Tokens,
            model_type,
            self.endpoint,
            config.model,
            config.model_name,
            worker_type=worker_type,
            needs=needs,
            kv_cache_block_size=model.block_size,
            runtime_config=card,
            custom_template_path=config.custom_jinja_template,
            ignore_weights=True,
        )

    def stop_on_signals(self, drain: Callable[[], Awaitable[None]]) -> None:
        """SIGTERM and SIGINT: leave discovery, let running requests end, `drain`, then `serve` returns."""

        async def stop() -> None:
            self._told_to_stop = True
            await drain()

        install_signal_handlers(
            asyncio.get_running_loop(), self._runtime, [self.endpoint], drain_callback=stop
        )

    async def serve(self, generate: Generate, describe: dict[str, Any]) -> None:
        """Answer requests until the runtime is shut down. `describe` answers the other stage's question."""
        await self.endpoint.serve_endpoint(
            as_dynamo_handler(generate, describe),
            graceful_shutdown=True,
            metrics_labels=[("model", self._config.model_name)],
            health_check_payload={_DESCRIBE: True},
        )

    def shutdown(self) -> None:
        self._runtime.shutdown()


def as_dynamo_handler(generate: Generate, describe: dict[str, Any]) -> Callable[..., Any]:
    """What Dynamo calls with each request. It finds the second parameter by its name."""

    async def handle(request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        if _DESCRIBE in request:
            yield describe
            return
        try:
            async with aclosing(generate(decode_request(request), context)) as chunks:
                async for chunk in chunks:
                    yield encode_chunk(chunk)
        except errors.DisaggError as error:
            if isinstance(error, errors.RequestCancelledError) and context.is_stopped():
                log.info("request %s: %s", context.id(), error)
                return
            log.warning("request %s: %s: %s", context.id(), type(error).__name__, error)
            raise to_dynamo(error) from error
        except Exception as error:
            # A bug of ours fails this request, not the worker.
            log.exception("request %s failed unexpectedly", context.id())
            raise dynamo_errors.Unknown(f"{type(error).__name__}: {error}") from error

    return handle


#: A request with this key asks who answers here. Dynamo's health probes send it, so they cost no tokens.
_DESCRIBE = "trtllm_disagg.describe"


class DynamoStageClient:
    """Calls the other stage's instances in turn, and translates whatever becomes of them."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._turns = itertools.count()
        self._described: dict[int, dict[str, Any]] = {}

    async def describe(self) -> dict[str, Any]:
        """What an instance of the other stage says of itself."""
        async with aclosing(self._translated({_DESCRIBE: True}, None)) as answers:
            async for answer in answers:
                return answer
        raise errors.PeerUnavailableError("the second stage did not say who it is")

    def call(self, request: dict[str, Any], context: RequestContext) -> AsyncGenerator[dict[str, Any], None]:
        return self._translated(request, context)

    async def pick(self) -> DynamoStageInstance:
        """Each in turn; what it says of itself is asked for once."""
        alive = self._client.instance_ids()
        if not alive:
            raise errors.PeerUnavailableError("no instance of the other stage is there")
        instance_id = alive[next(self._turns) % len(alive)]
        self._described = {i: said for i, said in self._described.items() if i in alive}
        if instance_id not in self._described:
            async with aclosing(self._translated({_DESCRIBE: True}, None, instance_id)) as answers:
                async for answer in answers:
                    self._described[instance_id] = answer
        if instance_id not in self._described:
            raise errors.PeerUnavailableError("an instance of the other stage did not say who it is")
        return DynamoStageInstance(self, instance_id, self._described[instance_id])

    async def _translated(
        self, request: dict[str, Any], context: RequestContext | None, instance_id: int | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        try:
            # Round robin skips instances that just failed. The context carries request id, trace and cancellation.
            stream = await (
                self._client.round_robin(request, context=context)
                if instance_id is None
                else self._client.direct(request, instance_id, context=context)
            )
            async for item in stream:
                if item.is_error():
                    raise errors.EngineError(
                        "; ".join(item.comments() or ["unknown error of the other stage"])
                    )
                yield item.data()
        except errors.DisaggError:
            raise
        except Exception as error:
            raise from_dynamo(error) from error


@dataclass(frozen=True, slots=True)
class DynamoStageInstance:
    """One instance of the other stage."""

    client: DynamoStageClient
    instance_id: int
    description: dict[str, Any]

    def call(self, request: dict[str, Any], context: RequestContext) -> AsyncGenerator[dict[str, Any], None]:
        return self.client._translated(request, context, self.instance_id)


def _registration(config: WorkerConfig) -> tuple[Any, Any, list[list[Any]]]:
    """(model type, worker type, needs). A first stage looks like a whole worker to the frontend, which is
    what makes it route requests by this worker's cache and leave the second stage alone.
    """
    served = ModelType.Empty
    for name in config.endpoint_types.split(","):
        served = served | _MODEL_TYPES[name.strip()]
    if config.role is Role.AGG or config.strategy is not Strategy.ROUTER:
        return served, WorkerType.Aggregated, []
    if config.role is Role.PREFILL:
        return ModelType.Prefill, WorkerType.Prefill, [[WorkerType.Decode]]
    return served, WorkerType.Decode, [[WorkerType.Prefill]]


_MODEL_TYPES = {"chat": ModelType.Chat, "completions": ModelType.Completions, "none": ModelType.Empty}


# -- errors. What Dynamo makes of each was measured (facts: dynamo.md section 5).

#: Tells a stage that ran out of time from a connection that did, which Dynamo gives the same category.
_OUR_TIMEOUT = f"{errors.StageTimeoutError.__name__}: "

#: Not EngineShutdown or WorkerUnavailable: those blacklist the worker that raises them for seconds.
_TO_DYNAMO: dict[str, Callable[[str], Exception]] = {
    "InvalidRequest": dynamo_errors.InvalidArgument,
    "CapacityExhausted": lambda message: dynamo_errors.HttpError(529, message),
    "Unavailable": dynamo_errors.CannotConnect,
    "DeadlineExceeded": lambda message: dynamo_errors.ConnectionTimeout(_OUR_TIMEOUT + message),
    "Cancelled": dynamo_errors.Cancelled,
    "Internal": dynamo_errors.Unknown,
}

_FROM_DYNAMO: dict[str, type[errors.DisaggError]] = {
    "InvalidRequest": errors.InvalidRequestError,
    "CapacityExhausted": errors.OverloadedError,
    "RateLimited": errors.OverloadedError,
    "Unavailable": errors.PeerUnavailableError,
    "DeadlineExceeded": errors.StageTimeoutError,
    "Cancelled": errors.RequestCancelledError,
    "Internal": errors.EngineError,
}

#: How a peer's exception arrives: "Category: message", with a type name before the message if not Dynamo's.
_ARRIVED = re.compile(rf"({'|'.join(_FROM_DYNAMO)}): (?:[A-Z]\w*Error: )?(.*)", re.DOTALL)


def to_dynamo(error: errors.DisaggError) -> Exception:
    return _TO_DYNAMO[error.category](str(error))


def from_dynamo(error: Exception) -> errors.DisaggError:
    if isinstance(error, dynamo_errors.InvalidArgument):
        return errors.InvalidRequestError(str(error))
    if match := _ARRIVED.match(str(error)):
        if match[1] == errors.StageTimeoutError.category and _OUR_TIMEOUT not in str(error):
            return errors.PeerUnavailableError(f"the other stage does not answer: {match[2]}")
        return _FROM_DYNAMO[match[1]](_message(match[2]))
    return errors.PeerUnavailableError(f"the other stage cannot be reached: {error}")


def _message(text: str) -> str:
    """Dynamo's HttpError crosses as JSON."""
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(text)["message"])
    return text
