"""The commands that a running deployment executes, and their encoding.

One set of types for both receivers: a worker (over Dynamo's request plane, signed with the deployment's key) and `up`
(over a socket in its run directory that only its user may open). To a worker a command travels as a request with the
one key CONTROL. No client of a frontend can send it: the frontend refuses unknown keys, and every request that it sends
has tokens, which no command has.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.config.settings import MOST_SECONDS
from trtllm_disagg.config.worker_config import Role, flag_of
from trtllm_disagg.errors import CommandRefusedError, ConfigError, InvalidRequestError
from trtllm_disagg.strategies import require_switchable

CONTROL = "trtllm_disagg.control"
#: At a worker's system port, POST /engine/ADMIN_ROUTE answers with the worker's description, or executes a command.
ADMIN_ROUTE = "trtllm_disagg"


class Describe(msgspec.Struct, frozen=True, tag_field="command", tag="describe", forbid_unknown_fields=True):
    """For `up` alone: asks for the description of a deployment. (Workers describe themselves to all who ask.)"""


class Switch(msgspec.Struct, frozen=True, tag_field="command", tag="switch", forbid_unknown_fields=True):
    """A worker becomes the stage that its role has under the strategy `to`; `up` also starts new workers so."""

    to: str


class Set(msgspec.Struct, frozen=True, tag_field="command", tag="set", forbid_unknown_fields=True):
    """Sets all thresholds in `values`, or none when one is refused by its name; `up` also starts new workers so."""

    values: dict[str, int | float | str | bool]


class Flip(msgspec.Struct, frozen=True, tag_field="command", tag="flip", forbid_unknown_fields=True):
    """A worker leaves, and serves again in the role `to` around the same engine; `up` restarts it in that role."""

    to: Literal["prefill", "decode"]
    #: Even the last worker of its role.
    force: bool = False
    #: For `up` alone: the worker's process, by name, or its instance id, hexadecimal.
    process: str = ""


class Scale(msgspec.Struct, frozen=True, tag_field="command", tag="scale", forbid_unknown_fields=True):
    """For `up` alone: the number of workers to run, by role."""

    workers: dict[str, int]
    #: Workers change roles where that is enough; only what is missing then starts, and what is too much stops.
    by_flips: bool = False


class Undo(msgspec.Struct, frozen=True, tag_field="command", tag="undo", forbid_unknown_fields=True):
    """For `up` alone, on the connection of a command that it has not done yet: takes the wish of that command back."""


class Leave(msgspec.Struct, frozen=True, tag_field="command", tag="leave", forbid_unknown_fields=True):
    """For a worker: it leaves discovery, finishes its requests for up to `seconds`, answers, and ends."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]


class Rollout(msgspec.Struct, frozen=True, tag_field="command", tag="rollout", forbid_unknown_fields=True):
    """For `up` alone: workers of `revision` take the place of those there are now, started with what is not empty here.
    The current revision takes back a rollout that is on its way.
    """

    revision: str
    model: str = ""
    #: Role -> path of its engine config.
    engine_configs: dict[str, str] = {}
    #: Interpreter of the new workers.
    python: str = ""
    worker_args: tuple[str, ...] = ()
    #: Of the old workers.
    drain_seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)] = 600.0
    #: One worker at a time, each new one on the GPUs of an old one.
    in_place: bool = False


Command = Switch | Set | Flip | Leave
UpCommand = Describe | Switch | Set | Flip | Scale | Rollout | Undo


def is_control(request: Mapping[str, Any]) -> bool:
    return CONTROL in request and "token_ids" not in request


def decode_command(raw: Any) -> Command:
    """For a worker. Raises InvalidRequestError, which names the wrong key and what is allowed."""
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


def decode_up_command(line: bytes) -> UpCommand:
    """For `up`: one line of JSON. Raises ConfigError, which names what is wrong and what is allowed."""
    try:
        command: UpCommand = msgspec.json.decode(line, type=UpCommand)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"command: {error}; expected one of describe, switch, set, flip, scale, rollout"
        ) from None
    return command


class Description(msgspec.Struct, frozen=True):
    """The part of a worker's description that commands need."""

    role: Role
    strategy: str
    model: str
    #: The worker is registered with frontends, which may send it requests.
    registered: bool = False
    #: Number of requests from frontends that the worker is answering.
    whole_requests: int = 0
    #: Number of requests that wait for their first token.
    queued_requests: int = 0
    #: Share of its KV blocks in use; None where its engine does not say.
    kv_occupancy: float | None = None
    #: Flags of the worker's start that keep it from being switched.
    fixed_by: tuple[str, ...] = ()
    #: The instance id that it had in the role before this one, hexadecimal; empty for one that was never flipped.
    flipped_from: str = ""
    #: The name of its process under `up`.
    process: str = ""
    #: It has entered its role; before that it may give way to another worker, or fail.
    ready: bool = True
    revision: str | None = None
    #: Of its life (`worker/life.py`); empty from an older version.
    state: str = ""
    #: The role that it flips to; empty when it does not.
    becomes: str = ""
    #: The id of the key that it obeys; None from an older version.
    key: str | None = None


@dataclass(frozen=True, slots=True)
class DescribedInstance:
    """A worker and its description, which has the keys of `Description` and more if it is of this package."""

    endpoint_id: str
    instance_id: int
    description: dict[str, Any]


# Every process that can open a connection to a worker's endpoint can send it commands. So a command carries a signature
# over the command, the instance that it is for, the time, and a nonce.

#: How far the clocks of two hosts may differ, and how long a worker remembers a nonce.
VALID_SECONDS = 60.0

Clock = Callable[[], float]


class SignedCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command as sent. `payload` is the JSON of a `SignedPayload`, byte for byte as it was signed."""

    payload: str = msgspec.field(name="order")
    key: str
    signature: str


class SignedPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`command` for the worker `instance_id`; `at` is in seconds since the epoch."""

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
        plain = msgspec.to_builtins(command)
        payload = SignedPayload(plain, instance_id, self._clock(), secrets.token_hex(16))
        text = msgspec.json.encode(payload).decode()
        signed = SignedCommand(text, self._key.id, self._key.signature(text))
        return {CONTROL: msgspec.to_builtins(signed)}


class Verifier:
    """Accepts each command once, only for `instance_id`, and at most VALID_SECONDS after it was signed."""

    def __init__(self, key: AdminKey | None, instance_id: int, clock: Clock = time.time) -> None:
        """`key`: None for a worker that was started without one, and takes no commands."""
        self._key = key
        self._instance_id = instance_id
        self._clock = clock
        #: Nonce -> when its command expires by itself.
        self._seen: dict[str, float] = {}

    @property
    def key_id(self) -> str | None:
        return None if self._key is None else self._key.id

    def command_of(self, raw: Any) -> Command:
        """Raises CommandRefusedError without a valid signature, InvalidRequestError when `raw` is no command."""
        if self._key is None:
            why = f"this worker has no key and takes no commands; start it with {flag_of('admin_key_file')} FILE"
            raise CommandRefusedError(f"{CONTROL}: {why}")
        if not (isinstance(raw, dict) and "signature" in raw):
            why = f"this worker takes commands signed with the key {self._key.id} only"
            raise CommandRefusedError(f"{CONTROL}: not signed; {why}")
        try:
            signed = msgspec.convert(raw, SignedCommand)
            if not self._key.has_signed(signed.payload, signed.signature):
                raise CommandRefusedError(
                    f"{CONTROL}: signed with another key ({signed.key[:12]!r}) than this worker's ({self._key.id})"
                )
            payload = msgspec.json.decode(signed.payload, type=SignedPayload)
        except msgspec.DecodeError as error:  # also of another version
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
            raise CommandRefusedError(f"{CONTROL}: this worker has had this command already")
        self._seen[payload.nonce] = payload.at + VALID_SECONDS
