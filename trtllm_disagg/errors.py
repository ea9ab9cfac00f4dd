"""Every error that this project raises on purpose.

    DisaggError
    ├── ConfigError             before serving: a flag, YAML, or two workers that do not fit together
    ├── InvalidRequestError     400  the caller's fault; final, never retried
    │   ├── HandoffRefusedError 400  a handoff that is malformed, foreign, or of another prompt
    │   └── CommandRefusedError 400  a control command without the deployment's key
    ├── OverloadedError         529  full; try again later
    ├── PeerUnavailableError    503  the worker of the other role is gone; may be retried elsewhere
    │   ├── NoInstanceError     503  no instance can take the request
    │   ├── QueueUnusableError  503  the prefill queue cannot take the request, or has lost it
    │   └── KvTransferError     503  the KV did not arrive: lease over, sender gone, read failed
    ├── WorkerLeavingError      503  this worker ends; the frontend continues the request on another one
    ├── StageTimeoutError       504  a phase took too long
    ├── RequestCancelledError   503  the client left; if it has not after all, the request may be retried
    └── EngineError             500  the engine failed this request
        └── EngineLostError          of the worker, not of a request: it ends because its engine is dead or hangs

`category` is the key by which `dynamo_runtime/error_mapping.py` chooses the exception of Dynamo that leaves the worker,
`status` the HTTP status that the client sees.
"""

from __future__ import annotations

import re
from reprlib import Repr
from typing import ClassVar

#: The last line on stderr of every command that failed starts with this.
ERROR_PREFIX = "error: "

#: Shortens values in messages: a file or a request may contain anything, however large.
_MOST_CHARS = 200
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _MOST_CHARS


def _shown(value: object) -> str:
    text = _SHORT.repr(value)
    return text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 3] + "..."


#: Characters that a terminal executes or takes for the end of a line, except tabs and newlines; and halves of a pair,
#: which JSON can escape and no stream can write.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
#: A newline without an indented line after it: what follows would look like a line of the log.
_LINE = re.compile(r"\n(?!  )")


def harmless(text: str) -> str:
    """Escape control characters and indent further lines, because a client may have written part of the text."""
    shown = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return _LINE.sub("\n  ", shown)


class DisaggError(Exception):
    category: ClassVar[str] = "Internal"
    status: ClassVar[int] = 500
    #: The instance of the other role that failed, where it is known.
    peer: int | None = None
    #: That instance has raised it: it works on the request no more.
    was_raised_there = False

    def __str__(self) -> str:
        return harmless(super().__str__())

    def blame(self, instance_id: int | None) -> None:
        """The instance that failed is this one, unless the error names one already."""
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
    """The caller asked for something that no worker can do."""

    category = "InvalidRequest"
    status = 400


class HandoffRefusedError(InvalidRequestError):
    """A handoff that does not belong to this prompt, model, layout or sender."""


class CommandRefusedError(InvalidRequestError):
    """A control command without a valid signature by the deployment's key."""


class OverloadedError(DisaggError):
    category = "CapacityExhausted"
    status = 529


class PeerUnavailableError(DisaggError):
    """The worker of the other role cannot be reached, or died while it was answering."""

    category = "Unavailable"
    status = 503


class NoInstanceError(PeerUnavailableError):
    """No instance of the other role can take this request."""


class QueueUnusableError(PeerUnavailableError):
    """The prefill queue cannot take the request, or has lost it: no worker will answer it from there."""


class KvTransferError(PeerUnavailableError):
    """KV blocks did not arrive whole. None of them is used."""


class WorkerLeavingError(DisaggError):
    """This worker ends before the request is finished: its engine died, or it was told to stop. With
    `--migration-limit` the frontend continues the request on another worker.
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
    """The engine failed while it was running a request."""


class EngineLostError(EngineError):
    """The engine is dead or does not stop. Its threads may keep the process from ending by itself."""


def named(kind: str, message: str) -> DisaggError | None:
    """The error of class `kind`, raised by another process of the same engine; None for a class not defined here."""
    found = globals().get(kind)
    return found(message) if isinstance(found, type) and issubclass(found, DisaggError) else None
