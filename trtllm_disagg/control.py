"""What a running worker can be told, and how that looks on the wire.

A command travels as a request with the one key CONTROL. No client of a frontend can send it: the frontend refuses
keys that it does not know, and whatever it sends has tokens, which no command has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from trtllm_disagg.config import Role, Strategy
from trtllm_disagg.errors import InvalidRequestError

CONTROL = "trtllm_disagg.control"

#: Between these a deployment can switch while it serves: the same workers run all of them.
SWITCHABLE = (Strategy.PREFILL_FIRST, Strategy.DECODE_FIRST, Strategy.AUTO)


class Describe(msgspec.Struct, frozen=True, tag_field="command", tag="describe", forbid_unknown_fields=True):
    """Who are you?"""


class Switch(msgspec.Struct, frozen=True, tag_field="command", tag="switch", forbid_unknown_fields=True):
    """Be the first or the second stage, as your role is under `to`."""

    to: str

    @property
    def strategy(self) -> Strategy:
        return switchable(self.to)


class Set(msgspec.Struct, frozen=True, tag_field="command", tag="set", forbid_unknown_fields=True):
    """Thresholds: all of `values`, or none when one of them is refused by its name."""

    values: dict[str, int | float | str | bool]


Command = Describe | Switch | Set
COMMANDS: tuple[str, ...] = ("describe", "switch", "set")


def is_control(request: Mapping[str, Any]) -> bool:
    return CONTROL in request and "token_ids" not in request


def encode_command(command: Command) -> dict[str, Any]:
    return {CONTROL: msgspec.to_builtins(command)}


def decode_command(raw: Any) -> Command:
    """Raise InvalidRequestError naming the key that does not fit, and what is allowed."""
    try:
        command: Command = msgspec.convert(raw, Command)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            f"{CONTROL}: {error}; expected a command of {', '.join(COMMANDS)}"
        ) from None
    if isinstance(command, Switch):
        switchable(command.to)
    return command


def switchable(to: str) -> Strategy:
    """Raise InvalidRequestError unless a running deployment can become that."""
    if to not in SWITCHABLE:
        raise InvalidRequestError(
            f"to: {to!r} is not allowed; expected one of {', '.join(SWITCHABLE)} "
            "(router and agg need other workers; start a deployment of their own)"
        )
    return Strategy(to)


class Description(msgspec.Struct, frozen=True):
    """What a switch has to know of a worker; it tells more."""

    role: Role
    strategy: Strategy
    model: str
    #: The frontend knows it, and may send it requests.
    registered: bool = False
    #: Whole requests, from a frontend, that it is answering.
    whole_requests: int = 0
    #: Flags of its start without which it could be switched.
    fixed_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Told:
    """A worker, and what it says of itself: a `Description` and more, if it is one of ours."""

    endpoint_id: str
    instance_id: int
    said: dict[str, Any]
