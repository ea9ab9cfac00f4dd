"""The commands to a running worker, over the request plane and at its system port."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtllm_disagg.admin.commands import CONTROL, Command, Flip, Leave, Set, Verifier
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.dynamo_runtime.handler import DESCRIBE
from trtllm_disagg.errors import DisaggError, InvalidRequestError, PeerUnavailableError
from trtllm_disagg.worker.flips import check_flip, flipped
from trtllm_disagg.worker.life import Event
from trtllm_disagg.worker.stage_state import StageState

if TYPE_CHECKING:
    from trtllm_disagg.worker.leaving import Leaving
    from trtllm_disagg.worker.worker import RoleTerm

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Control:
    term: RoleTerm
    verifier: Verifier

    async def at_system_port(self, body: Any) -> dict[str, Any]:
        """The JSON answer to POST /engine/ADMIN_ROUTE, also of a worker that discovery does not list. Everyone may ask
        for the description; commands are signed.
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

    async def handle(self, raw: Any) -> dict[str, Any]:
        """Execute a control command and return its JSON answer. Raises a DisaggError when nothing has changed, for one
        CommandRefusedError: the command is not signed with the deployment's key.
        """
        command = self.verifier.command_of(raw)
        stage, leaving = self.term.stage, self.term.leaving
        if stage is None or leaving is None:
            state = self.term.process.life.state
            raise PeerUnavailableError(f"this worker is {state.value}, and takes commands later")
        # The shield lets a change that has begun complete when the client that asked disconnects.
        return await asyncio.shield(asyncio.create_task(self._execute(command, stage, leaving)))

    async def _execute(self, command: Command, stage: StageState, leaving: Leaving) -> dict[str, Any]:
        if isinstance(command, Set):
            return {"changed": stage.live.set_thresholds(command.values, "set")}
        if isinstance(command, Flip):
            async with stage.changing:
                return {"warnings": await self._flip(Role(command.to), force=command.force)}
        if isinstance(command, Leave):
            return {"requests_left": await leaving.finish(command.seconds)}
        await stage.switch(command.to)
        return self.term.describe()

    async def _flip(self, to: Role, *, force: bool) -> list[str]:
        """Begin to leave for another role. Returns a sentence for each thing that will only be slow there."""
        term = self.term
        flipped(term.config, to)
        warnings = check_flip(term.describe() | {"role": to.value}, await term.others(), force=force)
        term.process.life.command(Event.FLIP, to)
        for warning in warnings:
            log.warning("as a %s worker: %s", to, warning)
        return warnings
