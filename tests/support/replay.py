"""KV events as a router sees them."""

from __future__ import annotations

from typing import Any


class Replay:
    """A router's knowledge: applies events in order."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.last_id = -1

    def apply(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            assert event["event_id"] == self.last_id + 1
            self.last_id = event["event_id"]
            data = event["data"]
            if data["type"] == "stored":
                parent = data["parent_hash"]
                assert parent is None or parent in self.known, "the parent of a stored block is not known"
                hashes = [block["block_hash"] for block in data["blocks"]]
                assert not self.known & set(hashes), "a block is stored twice"
                self.known |= set(hashes)
            elif data["type"] == "removed":
                assert set(data["block_hashes"]) <= self.known, "an unknown block is removed"
                self.known -= set(data["block_hashes"])
