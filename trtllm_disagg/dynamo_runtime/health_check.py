"""What Dynamo's health probes send: a request, which this worker runs whole on its own engine, whatever its role."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.errors import ConfigError, InvalidRequestError
from trtllm_disagg.wire.bodies import decode_request

#: Marks such a request. It costs a token at least: an engine that says that it lives may be stuck.
PROBE = "trtllm_disagg.probe"

#: One token of a prompt of one, before all that waits.
_DEFAULT = {"token_ids": [1], "stop_conditions": {"max_tokens": 1}, "priority": 1.0}


def health_check_payload(given: str | None) -> dict[str, Any]:
    """`given`: the setting of that name. Raises ConfigError for what is no request."""
    payload = _DEFAULT if given is None else _read(given)
    try:
        decode_request(payload)
    except InvalidRequestError as error:
        allowed = f"a request such as {json.dumps(_DEFAULT)} ({error})"
        raise ConfigError.bad_value(flag_of("health_check_payload"), given, allowed) from None
    return payload | {PROBE: True}


def _read(given: str) -> dict[str, Any]:
    flag = flag_of("health_check_payload")
    try:
        text = Path(given[1:]).expanduser().read_text() if given.startswith("@") else given
        payload = json.loads(text)
    except OSError as error:
        allowed = f"JSON, or @FILE with a file that can be read ({error.strerror})"
        raise ConfigError.bad_value(flag, given, allowed) from None
    except ValueError as error:
        raise ConfigError.bad_value(flag, given, f"JSON, or @FILE with it ({error})") from None
    if not isinstance(payload, dict):
        raise ConfigError.bad_value(flag, given, "a JSON object")
    return payload
