"""The commands to a running worker, over the request plane and at its system port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trtllm_disagg.admin.commands import CONTROL, Command, Flip, Leave, Set, Verifier
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.handler import DESCRIBE
from trtllm_disagg.errors import DisaggError, InvalidRequestError, PeerUnavailableError
from trtllm_disagg.handlers.services import LiveState
from trtllm_disagg.worker.flips import check_flip, flipped
from trtllm_disagg.worker.life import Event, Life
from trtllm_disagg.worker.pairing import Description
from trtllm_disagg.worker.stage_state import StageState

if TYPE_CHECKING:
    from trtllm_disagg.worker.leaving import Leaving

log = logging.getLogger(__name__)


class Changeable(NamedTuple):
    """What commands change."""

    live: LiveState
    stage: StageState
    leaving: Leaving


@dataclass(eq=False)
class Control:
    config: WorkerConfig
    life: Life
    verifier: Verifier
    instance_id: int
    describe: Callable[[], dict[str, Any]]
    #: Describes all other workers of the model.
    list_others: Callable[[], Awaitable[Sequence[Description]]]
    #: None until discovery lists the worker.
    changes: Changeable | None = None

    async def at_system_port(self, body: Any) -> dict[str, Any]:
        """The JSON answer to POST /engine/ADMIN_ROUTE, also of a worker that discovery does not list. Everyone may ask
        for the description; commands are signed.
        """
        if not body or body == {DESCRIBE: True}:
            return {"instance": f"{self.instance_id:x}"} | self.describe()
        try:
            if not isinstance(body, dict) or [*body] != [CONTROL]:
                allowed = f"{{}}, {{{DESCRIBE!r}: true}} or a signed command in {{{CONTROL!r}: ...}}"
                raise InvalidRequestError(f"{body!r:.80} is not allowed; expected {allowed}")
            return {"answer": await self.handle(body[CONTROL])}
        except DisaggError as error:
            return {"error": {"message": str(error), "code": error.category}}

    async def handle(self, raw: Any) -> dict[str, Any]:
        """Execute a control command and return its JSON answer. Raises a DisaggError when nothing has changed, for one
        CommandRefusedError: the command is not signed with the deployment's key.
        """
        command = self.verifier.command_of(raw)
        if self.changes is None:
            raise PeerUnavailableError(f"this worker is {self.life.state.value}, and takes commands later")
        # The shield lets a change that has begun complete when the client that asked disconnects.
        return await asyncio.shield(asyncio.create_task(self._execute(command, *self.changes)))

    async def _execute(
        self, command: Command, live: LiveState, stage: StageState, leaving: Leaving
    ) -> dict[str, Any]:
        if isinstance(command, Set):
            return {"changed": live.set_thresholds(command.values, "set")}
        if isinstance(command, Flip):
            async with stage.changing:
                return {"warnings": await self._flip(Role(command.to), force=command.force)}
        if isinstance(command, Leave):
            return {"requests_left": await leaving.finish(command.seconds)}
        await stage.switch(command.to)
        return self.describe()

    async def _flip(self, to: Role, *, force: bool) -> list[str]:
        """Begin to leave for another role. Returns a sentence for each thing that will only be slow there."""
        flipped(self.config, to)
        description = self.describe() | {"role": to.value}
        warnings = check_flip(description, await self.list_others(), force=force)
        self.life.command(Event.FLIP, to)
        for warning in warnings:
            log.warning("as a %s worker: %s", to, warning)
        return warnings
