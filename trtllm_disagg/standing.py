"""What a worker is in its deployment, first stage or second one, and how that changes while it serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from trtllm_disagg.config import Role, Strategy, WorkerConfig
from trtllm_disagg.control import Command, Set, Settings, Switch, decode_command
from trtllm_disagg.errors import InvalidRequestError, PeerUnavailableError
from trtllm_disagg.handlers.live import Live
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

log = logging.getLogger(__name__)

Model = TypeVar("Model", contravariant=True)


class Place(Protocol[Model]):
    """`runtime.Runtime`, as far as it is used here."""

    async def register(self, model: Model) -> None: ...

    async def unregister(self) -> None: ...


class OtherStage(Protocol):
    """`runtime.DynamoStageClient`, as far as it is used here."""

    @property
    def is_there(self) -> bool: ...


class Standing:
    """`strategy` is the deployment's, as this worker knows it."""

    def __init__(
        self, config: WorkerConfig, me: dict[str, Any], place: Place[Model], model: Model, other: OtherStage
    ) -> None:
        """`me` is what does not change of the worker's description; `other` is asked only by who may switch."""
        self.strategy = Live(config.strategy.value)
        self.settings = Settings()
        self._config = config
        self._me = me
        self._place = place
        self._model = model
        self._other = other
        self._registered = False
        self._whole_requests = 0
        #: One change at a time.
        self._changing = asyncio.Lock()

    def describe(self) -> dict[str, Any]:
        """JSON. What changes is as of now."""
        return self._me | {
            "strategy": self.strategy.value,
            "registered": self._registered,
            "whole_requests": self._whole_requests,
        }

    async def take(self) -> None:
        """Become what the configuration says. Raises what registering raises."""
        async with self._changing:
            if self._config.role is Role.AGG or self._is_first(Strategy(self.strategy.value)):
                await self._register()

    async def obey(self, raw: Any) -> dict[str, Any]:
        """Do what a control command says; the answer is JSON. Raises a DisaggError, and then nothing has changed."""
        return await self._do(decode_command(raw))

    async def _do(self, command: Command) -> dict[str, Any]:
        if isinstance(command, Switch):
            await self._switch(command.strategy)
        elif isinstance(command, Set):
            changed = self.settings.set(command.values)
            log.info("set by command: %s", changed)
            return {"changed": changed}
        return self.describe()

    async def _switch(self, to: Strategy) -> None:
        config = self._config
        if not config.may_switch:
            raise InvalidRequestError(
                f"to: {to!r} is not allowed in mode {config.role} under {config.strategy}; "
                "expected no switch: such a worker runs nothing else"
            )
        async with self._changing:
            was = self.strategy.value
            # Whoever becomes the first stage does so before a request can come, whoever leaves after the last one.
            if self._is_first(to):
                self._require_other()
                self.strategy.set(to.value)
                try:
                    await self._register()
                except BaseException:
                    self.strategy.set(was)
                    raise
            else:
                await self._unregister()
                self.strategy.set(to.value)
        log.info("switched from %s to %s: %s stage", was, to, "first" if self._registered else "second")

    def _is_first(self, strategy: Strategy) -> bool:
        return strategy.first_stage_role in (self._config.role, None)

    def _require_other(self) -> None:
        if not self._other.is_there:
            raise PeerUnavailableError(
                f"no worker of the other role is there at {self._config.partner_endpoint_id}"
            )

    async def _register(self) -> None:
        await self._place.register(self._model)
        self._registered = True

    async def _unregister(self) -> None:
        await self._place.unregister()
        self._registered = False

    def counting(self, generate: Generate) -> Generate:
        """Knows how many requests from frontends run, so that one can see when the last one has ended."""

        async def counted(
            request: GenerateRequest, context: RequestContext
        ) -> AsyncGenerator[TokenChunk, None]:
            whole = request.errand is None
            self._whole_requests += whole
            try:
                async with aclosing(generate(request, context)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            finally:
                self._whole_requests -= whole

        return counted
