"""Errors on their way through Dynamo. What it makes of each was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress

from dynamo.llm import exceptions as dynamo_errors

from trtllm_disagg import errors

#: Tells a stage that ran out of time from a connection that did, which Dynamo gives the same category.
_OUR_TIMEOUT = f"{errors.StageTimeoutError.__name__}: "

#: EngineShutdown blacklists the worker that raises it for seconds, and the frontend migrates the request: right for a
#: worker that ends, and for no other error.
_TO_DYNAMO: dict[str, Callable[[str], Exception]] = {
    "InvalidRequest": dynamo_errors.InvalidArgument,
    "CapacityExhausted": lambda message: dynamo_errors.HttpError(529, message),
    "Unavailable": dynamo_errors.CannotConnect,
    "Leaving": dynamo_errors.EngineShutdown,
    "DeadlineExceeded": lambda message: dynamo_errors.ConnectionTimeout(_OUR_TIMEOUT + message),
    # Never Cancelled (499, final): a client that left hears nothing, so what hears this has not left.
    "Cancelled": dynamo_errors.CannotConnect,
    "Internal": dynamo_errors.Unknown,
}

_FROM_DYNAMO: dict[str, type[errors.DisaggError]] = {
    "InvalidRequest": errors.InvalidRequestError,
    "CapacityExhausted": errors.OverloadedError,
    "RateLimited": errors.OverloadedError,
    "Unavailable": errors.PeerUnavailableError,
    "DeadlineExceeded": errors.StageTimeoutError,
    # Dynamo's word for all that a worker drops, at its end, too.
    "Cancelled": errors.PeerUnavailableError,
    "Internal": errors.EngineError,
}

#: How a peer's exception arrives: "Category: message", with a type name before the message if not Dynamo's.
_ARRIVED = re.compile(rf"({'|'.join(_FROM_DYNAMO)}): (?:[A-Z]\w*Error: )?(.*)", re.DOTALL)


def to_dynamo(error: errors.DisaggError) -> Exception:
    return _TO_DYNAMO[error.category](str(error))


def from_dynamo(error: Exception) -> errors.DisaggError:
    if isinstance(error, dynamo_errors.InvalidArgument):
        return errors.InvalidRequestError(str(error))
    if match := _ARRIVED.match(str(error)):
        if match[1] == errors.StageTimeoutError.category and _OUR_TIMEOUT not in str(error):
            return errors.PeerUnavailableError(f"the other stage does not answer: {match[2]}")
        return _FROM_DYNAMO[match[1]](_message(match[2]))
    return errors.PeerUnavailableError(f"the other stage cannot be reached: {error}")


def _message(text: str) -> str:
    """Dynamo's HttpError crosses as JSON."""
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(text)["message"])
    return text
