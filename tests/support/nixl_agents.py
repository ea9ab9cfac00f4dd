"""NIXL's agents with scripted ends of transfers."""

from __future__ import annotations

import queue
from typing import Any

from nixl_cu13._api import nixl_agent

from tests.support.fake_transport import WaitsFor


class ScriptedAgent(nixl_agent):  # type: ignore[misc]
    """Moves bytes as NIXL does, but reports scripted states."""

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        #: Reported state of every transfer; None: the real one.
        self.state: str | None = None
        #: Transfers reported as running.
        self.unending: list[Any] = []
        #: The newest transfer's handle.
        self.handle: Any = None
        #: Raised when the agent makes progress.
        self.failure: Exception | None = None
        self.num_added = 0
        self.forgotten: list[str] = []
        #: The next transfer waits for this.
        self.held: WaitsFor | None = None
        self._is_copying = False
        #: Calls to the agent while that transfer waits.
        self.asked_meanwhile: queue.SimpleQueue[str] = queue.SimpleQueue()
        #: Start of each local block list of the prepared transfers.
        self.own_tables: list[int] = []

    def transfer(self, handle: Any, *args: Any) -> Any:
        self.handle = handle
        held, self.held = self.held, None
        if held is not None:
            self._is_copying = True
            held.wait()
            self._is_copying = False
        state = super().transfer(handle, *args)
        return self.state or state

    def check_xfer_state(self, handle: Any) -> Any:
        if any(handle is each for each in self.unending):
            return "PROC"
        return self.state or super().check_xfer_state(handle)

    def release_xfer_handle(self, handle: Any) -> None:
        if self._is_copying:
            self.asked_meanwhile.put("release")
        super().release_xfer_handle(handle)

    def release_dlist_handle(self, handle: Any) -> None:
        if self._is_copying:
            self.asked_meanwhile.put("release blocks")
        super().release_dlist_handle(handle)

    def remove_remote_agent(self, agent: str) -> Any:
        if self._is_copying:
            self.asked_meanwhile.put("forget")
        self.forgotten.append(agent)
        return super().remove_remote_agent(agent)

    def add_remote_agent(self, metadata: bytes) -> Any:
        self.num_added += 1
        return super().add_remote_agent(metadata)

    def get_new_notifs(self, *args: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        return super().get_new_notifs(*args)

    def prep_xfer_dlist(self, agent_name: str, table: Any, *args: Any) -> Any:
        if agent_name == "NIXL_INIT_AGENT":
            self.own_tables.append(int(table[0][0]))
        return super().prep_xfer_dlist(agent_name, table, *args)


class ScriptedAgents(dict[str, ScriptedAgent]):
    """Agents by name; pass `make` to a NixlTransport."""

    def make(self, name: str, config: Any) -> ScriptedAgent:
        self[name] = ScriptedAgent(name, config)
        return self[name]

    def __bool__(self) -> bool:
        return True
