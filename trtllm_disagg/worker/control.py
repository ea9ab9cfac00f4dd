"""Executes commands to a running worker, over the request plane and at its system port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from trtllm_disagg.admin.commands import ADMIN_ROUTE, CONTROL, Command, Flip, Leave, Set, Verifier
from trtllm_disagg.config.engine_args import check_images
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.handler import DESCRIBE
from trtllm_disagg.errors import DisaggError, InvalidRequestError, PeerUnavailableError
from trtllm_disagg.handlers.drain import WorkerDrain
from trtllm_disagg.worker.flips import check_flip, flipped
from trtllm_disagg.worker.leaving import Leaving
from trtllm_disagg.worker.life import Event
from trtllm_disagg.worker.process import WorkerProcess
from trtllm_disagg.worker.stage_state import StageState

log = logging.getLogger(__name__)


class ControlledTerm(Protocol):
    """What commands read and change of a `RoleTerm`."""

    config: WorkerConfig
    process: WorkerProcess
    drain: WorkerDrain
    leaving: Leaving | None
    stage: StageState | None
    instance: str

    def describe(self) -> dict[str, Any]: ...
    async def others(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Control:
    term: ControlledTerm
    verifier: Verifier

    async def at_system_port(self, body: Any) -> dict[str, Any]:
        """The JSON answer to POST /engine/ADMIN_ROUTE, also from an unlisted worker. Anyone may ask for the
        description; commands are signed.
        """
        if not body or body == {DESCRIBE: True}:
            return {"instance": self.term.instance} | self.term.describe()
        try:
            if not isinstance(body, dict) or [*body] != [CONTROL]:
                allowed = f"{{}}, {{{DESCRIBE!r}: true}} or a signed command in {{{CONTROL!r}: ...}}"
                raise InvalidRequestError(f"{body!r:.80} is not allowed; expected {allowed}")
            return {"answer": await self.handle(body[CONTROL])}
        except DisaggError as error:
            return {"error": {"message": str(error), "code": error.category}}

    def routes(self) -> Iterator[tuple[str, Callable[[Any], Awaitable[dict[str, Any]]]]]:
        """At the system port: signed commands, and those that Dynamo's operators use (ai-dynamo/dynamo#11173)."""
        yield ADMIN_ROUTE, self.at_system_port
        yield "status", self.status
        if self.term.config.admin_routes:
            yield "drain", self.drain
            yield "resume", self.resume

    async def status(self, _: Any = None) -> dict[str, Any]:
        term, leaving = self.term, self.term.leaving
        is_paused = leaving is not None and leaving.is_paused
        state = "drained" if is_paused else term.process.life.state.value
        status = {"state": state, "requests": term.drain.num_running, "safe_to_delete": is_paused}
        return status | {"waits_for": leaving and leaving.waits_for}

    async def drain(self, _: Any = None) -> dict[str, Any]:
        """Leave discovery, finish all requests, and wait. Idempotent."""
        life = self.term.process.life
        if not life.reason.pauses:
            life.command(Event.PAUSE)
        return await self.status()

    async def resume(self, _: Any = None) -> dict[str, Any]:
        """Enter discovery again as a new instance."""
        if self.term.leaving is not None:
            self.term.leaving.resume()
        return await self.status()

    async def handle(self, raw: Any) -> dict[str, Any]:
        """Execute a control command and return its JSON answer. On a DisaggError nothing has changed, as on
        CommandRefusedError for a command not signed with the deployment's key.
        """
        command = self.verifier.command_of(raw)
        stage, leaving = self.term.stage, self.term.leaving
        if stage is None or leaving is None:
            state = self.term.process.life.state
            raise PeerUnavailableError(f"this worker is {state.value}; it takes commands later")
        # The shield completes a begun change even if its client disconnects.
        return await asyncio.shield(asyncio.create_task(self._execute(command, stage, leaving)))

    async def _execute(self, command: Command, stage: StageState, leaving: Leaving) -> dict[str, Any]:
        if isinstance(command, Set):
            return {"changed": stage.live.set_thresholds(command.values, "set")}
        if isinstance(command, Flip):
            async with stage.changing:
                return {"warnings": await self._flip(Role(command.to), force=command.force)}
        if isinstance(command, Leave):
            return {"requests_left": await leaving.finish(command.seconds, others_stay=command.others_stay)}
        await stage.switch(command.to)
        return self.term.describe()

    async def _flip(self, to: Role, *, force: bool) -> list[str]:
        """Begin to leave for another role. Returns a sentence per setting that will be slow there."""
        term = self.term
        check_images(flipped(term.config, to), term.process.engine_args)
        warnings = check_flip(term.describe() | {"role": to.value}, await term.others(), force=force)
        term.process.life.command(Event.FLIP, to)
        for warning in warnings:
            log.warning("as a %s worker: %s", to, warning)
        return warnings
