"""The errors that this project raises on purpose.

    DisaggError
    ├── ConfigError             before serving: wrong flag or YAML, or two workers that do not fit
    ├── InvalidRequestError     400  the caller's mistake; never retried
    │   ├── HandoffRefusedError 400  malformed or foreign handoff, or of another prompt
    │   └── CommandRefusedError 400  control command without the deployment's key
    ├── OverloadedError         529  full; retry later
    ├── PeerUnavailableError    503  a peer is gone; retried on another one
    │   ├── NoInstanceError     503  no instance accepts the request
    │   ├── QueueUnusableError  503  the prefill queue cannot be used
    │   └── KvTransferError     503  KV did not arrive: lease ended, sender gone, read failed
    ├── WorkerLeavingError      503  this worker ends; another one continues the request
    ├── StageTimeoutError       504  a phase took too long
    ├── RequestCancelledError   503  the client left; retried if it did not
    └── EngineError             500  the engine failed this request
        └── EngineLostError          the engine is dead or hangs, so the worker ends

`dynamo_runtime/error_mapping.py` maps `category` to the Dynamo exception that leaves the worker; `status` is the
client's HTTP status.
"""

from __future__ import annotations

import re
from reprlib import Repr
from typing import ClassVar

#: Starts the last line on stderr of every failed command.
ERROR_PREFIX = "error: "

#: Shortens values in messages: files and requests may contain values of any size.
_MAX_CHARS = 200
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _MAX_CHARS


def _shown(value: object) -> str:
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


#: Control characters and line separators, except tabs and newlines; and lone surrogates, which JSON can escape but no
#: stream can write.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
#: A newline without an indented line after it: what follows would look like a line of the log.
_LINE = re.compile(r"\n(?!  )")


def harmless(text: str) -> str:
    """Escape control characters and indent further lines: a client may have written part of the text."""
    shown = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return _LINE.sub("\n  ", shown)


class DisaggError(Exception):
    category: ClassVar[str] = "Internal"
    status: ClassVar[int] = 500
    #: The peer that failed, if known.
    peer: int | None = None
    #: The peer itself raised the error: it no longer works on the request.
    was_raised_there = False

    def __str__(self) -> str:
        return harmless(super().__str__())

    def blame(self, instance_id: int | None) -> None:
        """Name the failed instance, unless the error already names one."""
        if self.peer is None:
            self.peer = instance_id


class ConfigError(DisaggError):
    """A setting is wrong. The message names the key, the value and what is allowed."""

    category = "InvalidRequest"
    status = 400

    @classmethod
    def bad_value(cls, key: str, value: object, allowed: str) -> ConfigError:
        return cls(f"{key}: {_shown(value)} is not allowed; expected {allowed}")


class InvalidRequestError(DisaggError):
    """No worker can serve this request."""

    category = "InvalidRequest"
    status = 400


class HandoffRefusedError(InvalidRequestError):
    """The handoff belongs to another prompt, model, layout or sender."""


class CommandRefusedError(InvalidRequestError):
    """The control command has no valid signature by the deployment's key."""


class OverloadedError(DisaggError):
    category = "CapacityExhausted"
    status = 529


class PeerUnavailableError(DisaggError):
    """The peer cannot be reached, or died while answering."""

    category = "Unavailable"
    status = 503


class NoInstanceError(PeerUnavailableError):
    """No instance of the other role can take this request."""


class QueueUnusableError(PeerUnavailableError):
    """The prefill queue cannot take the request, or has lost it."""


class KvTransferError(PeerUnavailableError):
    """The KV did not arrive completely, so none of it is used."""


class WorkerLeavingError(DisaggError):
    """This worker ends before its request: its engine died, or it must stop. With `--migration-limit` the frontend
    continues the request on another worker.
    """

    category = "Leaving"
    status = 503


class StageTimeoutError(DisaggError):
    category = "DeadlineExceeded"
    status = 504


class RequestCancelledError(DisaggError):
    category = "Cancelled"
    status = 503


class EngineError(DisaggError):
    """The engine failed a request."""


class EngineLostError(EngineError):
    """The engine is dead or does not stop. Its threads may keep the process alive."""


def named(name: str, message: str) -> DisaggError | None:
    """An error of class `name`, from another process of the engine; None for a class not defined here."""
    found = globals().get(name)
    return found(message) if isinstance(found, type) and issubclass(found, DisaggError) else None
