"""Translates errors to Dynamo's and back, by measured behaviour."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress

from dynamo.llm import exceptions as dynamo_errors

from trtllm_disagg import errors

#: Distinguishes a stage's timeout from a connection's, which share a category in Dynamo. Likewise a refused handoff.
_OUR_TIMEOUT = f"{errors.StageTimeoutError.__name__}: "
_REFUSED = f"{errors.HandoffRefusedError.__name__}: "

#: EngineShutdown makes the frontend avoid the worker for seconds and migrate the request: right only for a worker that
#: ends.
_TO_DYNAMO: dict[str, Callable[[str], Exception]] = {
    "InvalidRequest": dynamo_errors.InvalidArgument,
    "CapacityExhausted": lambda message: dynamo_errors.HttpError(529, message),
    "Unavailable": dynamo_errors.CannotConnect,
    "Leaving": dynamo_errors.EngineShutdown,
    "DeadlineExceeded": lambda message: dynamo_errors.ConnectionTimeout(_OUR_TIMEOUT + message),
    # Not Dynamo's Cancelled (499, final): a disconnected client gets no answer, so this one is connected.
    "Cancelled": dynamo_errors.CannotConnect,
    "Internal": dynamo_errors.Unknown,
}

_FROM_DYNAMO: dict[str, type[errors.DisaggError]] = {
    "InvalidRequest": errors.InvalidRequestError,
    "CapacityExhausted": errors.OverloadedError,
    "RateLimited": errors.OverloadedError,
    "Unavailable": errors.PeerUnavailableError,
    "DeadlineExceeded": errors.StageTimeoutError,
    # Dynamo's category for all that a worker drops, also at its end.
    "Cancelled": errors.PeerUnavailableError,
    "Internal": errors.EngineError,
}

#: The text of a peer's exception: "Category: message", with a type name before the message unless it is Dynamo's.
_ARRIVED = re.compile(rf"({'|'.join(_FROM_DYNAMO)}): (?:[A-Z]\w*Error: )?(.*)", re.DOTALL)


def to_dynamo(error: errors.DisaggError) -> Exception:
    name = _REFUSED if isinstance(error, errors.HandoffRefusedError) else ""
    return _TO_DYNAMO[error.category](name + str(error))


def from_dynamo(error: Exception) -> errors.DisaggError:
    if isinstance(error, dynamo_errors.InvalidArgument):
        error_type = (
            errors.HandoffRefusedError if str(error).startswith(_REFUSED) else errors.InvalidRequestError
        )
        refused = error_type(str(error).removeprefix(_REFUSED))
        refused.was_raised_there = True
        return refused
    if match := _ARRIVED.match(str(error)):
        if match[1] == errors.StageTimeoutError.category and _OUR_TIMEOUT not in str(error):
            return errors.PeerUnavailableError(f"the other stage does not answer: {match[2]}")
        arrived = _FROM_DYNAMO[match[1]](_message(match[2]))
        # A worker may still work on requests that it drops.
        arrived.was_raised_there = match[1] != errors.RequestCancelledError.category
        return arrived
    return errors.PeerUnavailableError(f"the other stage cannot be reached: {error}")


def _message(text: str) -> str:
    """An error's message; Dynamo sends HttpError as JSON."""
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(text)["message"])
    return text
