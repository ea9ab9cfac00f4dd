"""Every error that this project raises on purpose.

    DisaggError
    ├── ConfigError             before serving: a flag, YAML, or two workers that do not fit together
    ├── InvalidRequestError     400  the caller's fault; final, never retried
    │   ├── HandoffRefusedError 400  a handoff that is malformed, foreign, or of another prompt
    │   └── CommandRefusedError 400  a control command without the deployment's key
    ├── OverloadedError         529  full; try again later
    ├── PeerUnavailableError    503  the other stage is gone; may be retried elsewhere
    │   ├── NoInstanceError     503  no instance is there
    │   ├── QueueUnusableError  503  the prefill queue cannot take the request, or has lost it
    │   └── KvTransferError     503  the KV did not arrive: lease over, sender gone, read failed
    ├── WorkerLeavingError      503  this worker ends; the frontend goes on with the request on another one
    ├── StageTimeoutError       504  a stage took too long
    ├── RequestCancelledError   499  the client left
    └── EngineError             500  the engine failed this request
        └── EngineLostError          no request's: the worker ends because its engine is dead, or does not end

`category` is the word under which an error crosses the wire between two workers (`runtime.py` maps it to and
from Dynamo's exceptions), `status` the HTTP status that the client sees.
"""

from __future__ import annotations

import re
from reprlib import Repr
from typing import ClassVar

#: What a command's last line on stderr starts with when it failed, in every command.
ERROR_PREFIX = "error: "

#: A value in a message may be anything that a file or a request brings along, however large.
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _MOST_CHARS = 200


def _shown(value: object) -> str:
    text = _SHORT.repr(value)
    return text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 3] + "..."


#: What a terminal obeys, or takes for the end of a line. Tabs and newlines are not among them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
#: The start of a further line, where a log could have a line of its own.
_LINE = re.compile(r"\n(?!  )")


def _harmless(text: str) -> str:
    """A client may have written a part of it: no terminal obeys it, and no log has a line that starts with it."""
    shown = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return _LINE.sub("\n  ", shown)


class DisaggError(Exception):
    category: ClassVar[str] = "Internal"
    status: ClassVar[int] = 500
    #: The instance of the other stage that failed, where it is known.
    peer: int | None = None

    def __str__(self) -> str:
        return _harmless(super().__str__())


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
    """A control command that does not prove that it comes from a holder of the deployment's key."""


class OverloadedError(DisaggError):
    category = "CapacityExhausted"
    status = 529


class PeerUnavailableError(DisaggError):
    """The other stage cannot be reached, or died while it was answering."""

    category = "Unavailable"
    status = 503


class NoInstanceError(PeerUnavailableError):
    """No instance of the other stage is there that this request may be sent to."""


class QueueUnusableError(PeerUnavailableError):
    """The prefill queue cannot take the request, or has lost it: no worker will answer it from there."""


class KvTransferError(PeerUnavailableError):
    """KV blocks did not arrive whole. Nothing of them is used."""


class WorkerLeavingError(DisaggError):
    """This worker ends, because its engine died or it was told to stop, before this request has. Another worker can
    go on with it: with `--migration-limit` the frontend has one do so.
    """

    category = "Leaving"
    status = 503


class StageTimeoutError(DisaggError):
    category = "DeadlineExceeded"
    status = 504


class RequestCancelledError(DisaggError):
    category = "Cancelled"
    status = 499


class EngineError(DisaggError):
    """The engine failed while it was running a request."""


class EngineLostError(EngineError):
    """The engine is dead or does not end. Its threads may keep the process from ending by itself."""


def named(kind: str, message: str) -> DisaggError | None:
    """The error of this class name, as another process of the same engine raised it; None when it is none of these."""
    found = globals().get(kind)
    return found(message) if isinstance(found, type) and issubclass(found, DisaggError) else None
