"""Control commands that prove their origin: only the holder of the deployment's key can change a worker.

A worker's endpoint can be reached by every process that can open a connection to it. So a command that changes
something carries a signature over the command, the instance that it is for, the time, and a nonce. To ask what a worker
is needs none.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from trtllm_disagg.admin_key import AdminKey
from trtllm_disagg.config import flag_of
from trtllm_disagg.control import CONTROL, Command, Describe, decode_command, encode_command
from trtllm_disagg.errors import CommandRefusedError, InvalidRequestError

#: How far the clocks of two hosts may differ. So long a worker remembers the nonces that it has seen.
VALID_SECONDS = 60.0

Clock = Callable[[], float]


class SignedCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """On the wire. `order` is the JSON of an `Order`, to the byte as it was signed."""

    order: str
    key: str
    signature: str


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`command` for the worker `instance_id`; `at` is in seconds since the epoch."""

    command: dict[str, Any]
    instance_id: int
    at: float
    nonce: str


class Signer(Protocol):
    def request(self, command: Command, instance_id: int) -> dict[str, Any]:
        """What is sent to the worker `instance_id`."""
        ...


class Verifier(Protocol):
    def command_of(self, raw: Any) -> Command:
        """Raises CommandRefusedError without a valid signature, InvalidRequestError for what is no command."""
        ...


class KeySigner:
    def __init__(self, key: AdminKey, clock: Clock = time.time) -> None:
        self._key = key
        self._clock = clock

    def request(self, command: Command, instance_id: int) -> dict[str, Any]:
        plain = encode_command(command)
        order = Order(plain[CONTROL], instance_id, self._clock(), secrets.token_hex(16))
        text = msgspec.json.encode(order).decode()
        signed = SignedCommand(text, self._key.id, self._key.signature(text))
        return {CONTROL: msgspec.to_builtins(signed)}


class KeyVerifier:
    """Takes each command once, for `instance_id` only, and only while it is fresh."""

    def __init__(self, key: AdminKey, instance_id: int, clock: Clock = time.time) -> None:
        self._key = key
        self._instance_id = instance_id
        self._clock = clock
        #: Nonce -> when its command is too old anyway.
        self._seen: dict[str, float] = {}

    def command_of(self, raw: Any) -> Command:
        if not _is_signed(raw):
            return _unsigned(raw, f"this worker takes commands signed with the key {self._key.id} only")
        signed = _convert(raw, SignedCommand)
        if not self._key.has_signed(signed.order, signed.signature):
            raise CommandRefusedError(
                f"{CONTROL}: signed with another key ({signed.key[:12]!r}) than this worker's ({self._key.id})"
            )
        order = msgspec.json.decode(signed.order, type=Order)
        self._require_fresh(order)
        return decode_command(order.command)

    def _require_fresh(self, order: Order) -> None:
        now = self._clock()
        if order.instance_id != self._instance_id:
            raise CommandRefusedError(f"{CONTROL}: signed for another worker, instance {order.instance_id:x}")
        if not abs(now - order.at) <= VALID_SECONDS:
            raise CommandRefusedError(
                f"{CONTROL}: signed {now - order.at:.0f} s ago by this worker's clock; expected at most "
                f"{VALID_SECONDS:g} (do the clocks of the two hosts agree?)"
            )
        self._seen = {nonce: until for nonce, until in self._seen.items() if until >= now}
        if order.nonce in self._seen:
            raise CommandRefusedError(f"{CONTROL}: this worker has had this command already")
        self._seen[order.nonce] = order.at + VALID_SECONDS


class NoKeyVerifier:
    """Of a worker that was started without a key."""

    def command_of(self, raw: Any) -> Command:
        why = f"this worker has no key and takes no commands; start it with {flag_of('admin_key_file')} FILE"
        if _is_signed(raw):
            raise CommandRefusedError(f"{CONTROL}: {why}")
        return _unsigned(raw, why)


def _is_signed(raw: Any) -> bool:
    return isinstance(raw, dict) and "signature" in raw


def _unsigned(raw: Any, why_not: str) -> Command:
    """Only what changes nothing."""
    command = decode_command(raw)
    if not isinstance(command, Describe):
        raise CommandRefusedError(f"{CONTROL}: not signed; {why_not}")
    return command


def _convert(raw: Any, kind: type[SignedCommand]) -> SignedCommand:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{CONTROL}: {error}") from None
