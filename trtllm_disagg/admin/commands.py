"""The commands that a worker executes, and their encoding. `up` has more (`tools/up/commands.py`).

A worker gets a command over Dynamo's request plane, signed with the deployment's key, as a request with the single key
CONTROL. A frontend's clients cannot send one: the frontend refuses unknown keys, and its requests have tokens, which no
command has.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.config.settings import MAX_SECONDS
from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.errors import CommandRefusedError, ConfigError, InvalidRequestError
from trtllm_disagg.strategies import require_switchable

CONTROL = "trtllm_disagg.control"
#: At a worker's system port, POST /engine/ADMIN_ROUTE returns the worker's description, or executes a command.
ADMIN_ROUTE = "trtllm_disagg"


class Switch(msgspec.Struct, frozen=True, tag_field="command", tag="switch", forbid_unknown_fields=True):
    """Makes a worker the stage that its role has under the strategy `to`; `up` also starts new workers so."""

    to: str


class Set(msgspec.Struct, frozen=True, tag_field="command", tag="set", forbid_unknown_fields=True):
    """Sets all thresholds in `values`, or none if one is refused; `up` also starts new workers so."""

    values: dict[str, int | float | str | bool]
    #: For `up` only: the one worker to set, as in Flip.
    process: str = ""


class Flip(msgspec.Struct, frozen=True, tag_field="command", tag="flip", forbid_unknown_fields=True):
    """Makes a worker leave and serve in the role `to` with the same engine; `up` restarts it in that role."""

    to: Literal["prefill", "decode"]
    #: Also flips the last worker of its role.
    force: bool = False
    #: For `up` only: the worker's process name or hexadecimal instance id.
    process: str = ""


class Leave(msgspec.Struct, frozen=True, tag_field="command", tag="leave", forbid_unknown_fields=True):
    """Makes a worker leave discovery, finish requests for up to `seconds`, answer, and end."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
    #: Not all workers of its namespace leave, so it stays open.
    others_stay: bool = False


Command = Switch | Set | Flip | Leave


def is_control(request: Mapping[str, Any]) -> bool:
    return CONTROL in request and "token_ids" not in request


def decode_command(raw: Any) -> Command:
    """Raises InvalidRequestError, naming the wrong key and what is allowed."""
    try:
        command: Command = msgspec.convert(raw, Command)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            f"{CONTROL}: {error}; expected a command of switch, set, flip, leave"
        ) from None
    if isinstance(command, Switch):
        try:
            require_switchable(command.to, "to")
        except ConfigError as error:
            raise InvalidRequestError(str(error)) from None
    return command


@dataclass(frozen=True, slots=True)
class DescribedInstance:
    """A worker and its description."""

    endpoint_id: str
    instance_id: int
    description: dict[str, Any]


# Any process that can connect to a worker's endpoint can send commands. So each has a signature over command, target
# instance, time and nonce.

#: Seconds that two hosts' clocks may differ, and that a worker remembers a nonce.
VALID_SECONDS = 60.0

Clock = Callable[[], float]


class SignedCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command as sent. `payload`: the JSON of a `SignedPayload`, byte for byte as signed."""

    payload: str = msgspec.field(name="order")
    key: str
    signature: str


class SignedPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`command` is for the worker `instance_id`; `at`: seconds since the epoch."""

    command: dict[str, Any]
    instance_id: int
    at: float
    nonce: str


class Signer:
    def __init__(self, key: AdminKey, clock: Clock = time.time) -> None:
        self._key = key
        self._clock = clock

    @property
    def key_id(self) -> str:
        return self._key.id

    def request(self, command: Command, instance_id: int) -> dict[str, Any]:
        """The request that carries the command to the worker `instance_id`."""
        # Older workers do not know fields for `up` only, which are empty here, and `others_stay`.
        sent = msgspec.to_builtins(command).items()
        plain = {name: value for name, value in sent if value is not False and value != ""}
        payload = SignedPayload(plain, instance_id, self._clock(), secrets.token_hex(16))
        text = msgspec.json.encode(payload).decode()
        signed = SignedCommand(text, self._key.id, self._key.signature(text))
        return {CONTROL: msgspec.to_builtins(signed)}


class Verifier:
    """Accepts each command once, only for `instance_id`, and at most VALID_SECONDS after it was signed."""

    def __init__(self, key: AdminKey | None, instance_id: int, clock: Clock = time.time) -> None:
        """`key`: None on a worker started without one, which refuses commands."""
        self._key = key
        self._instance_id = instance_id
        self._clock = clock
        #: Nonce -> when its command expires.
        self._seen: dict[str, float] = {}

    @property
    def key_id(self) -> str | None:
        return None if self._key is None else self._key.id

    def command_of(self, raw: Any) -> Command:
        """Raises CommandRefusedError without a valid signature, InvalidRequestError if `raw` is no command."""
        if self._key is None:
            why = f"this worker has no key for commands; start it with {flag_of('admin_key_file')} FILE"
            raise CommandRefusedError(f"{CONTROL}: {why}")
        if not (isinstance(raw, dict) and "signature" in raw):
            why = f"this worker accepts only commands signed with the key {self._key.id}"
            raise CommandRefusedError(f"{CONTROL}: not signed; {why}")
        try:
            signed = msgspec.convert(raw, SignedCommand)
            if not self._key.has_signed(signed.payload, signed.signature):
                raise CommandRefusedError(
                    f"{CONTROL}: signed with another key ({signed.key[:12]!r}) than this worker's ({self._key.id})"
                )
            payload = msgspec.json.decode(signed.payload, type=SignedPayload)
        except msgspec.DecodeError as error:  # also from another version
            raise InvalidRequestError(f"{CONTROL}: {error}") from None
        self._require_fresh(payload)
        return decode_command(payload.command)

    def _require_fresh(self, payload: SignedPayload) -> None:
        now = self._clock()
        if payload.instance_id != self._instance_id:
            raise CommandRefusedError(
                f"{CONTROL}: signed for another worker, instance {payload.instance_id:x}"
            )
        if not abs(now - payload.at) <= VALID_SECONDS:
            raise CommandRefusedError(
                f"{CONTROL}: signed {now - payload.at:.0f} s ago by this worker's clock; expected at most "
                f"{VALID_SECONDS:g} (do the clocks of the two hosts agree?)"
            )
        self._seen = {nonce: until for nonce, until in self._seen.items() if until >= now}
        if payload.nonce in self._seen:
            raise CommandRefusedError(f"{CONTROL}: this worker has already executed this command")
        self._seen[payload.nonce] = payload.at + VALID_SECONDS
