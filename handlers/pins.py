"""Which instances of the other stage a request asks for.

Dynamo's frontend takes our first stage for whole workers. So it holds `decode_worker_id` (and the header
x-dynamo-worker-instance-id) against that stage, answers 400 for anybody else, and passes `prefill_worker_id`
(x-dynamo-prefill-instance-id) on without a look. Both may come with any instance, whatever its role; measured in both
orders (docs/log.md).
"""

from __future__ import annotations

import re
from collections.abc import Collection

from trtllm_disagg.errors import InvalidRequestError
from trtllm_disagg.types import GenerateRequest

#: `nvext.annotations: ["disagg:next=1a2b,3c4d"]`: ids as logs print them, or decimal, as Dynamo does.
NEXT = "disagg:next="

_ID = re.compile(r"[0-9a-f]{1,16}|[0-9]{1,20}")


def pins_of(request: GenerateRequest, own_id: int, known: Collection[int]) -> list[int]:
    """The annotation's ids, else Dynamo's; this worker itself is no wish. `known` tells how a number was meant.
    Raises InvalidRequestError for what is no id.
    """
    words = [w for a in request.annotations if a.startswith(NEXT) for w in a.removeprefix(NEXT).split(",")]
    if words:
        return [_read(word.strip().lower(), known) for word in words]
    return [pin for pin in request.pins.values() if pin not in (None, own_id)]


def names_prefill(request: GenerateRequest) -> bool:
    """On a decode worker: whether it asks for certain prefill workers."""
    return request.pins.get("prefill") is not None or any(a.startswith(NEXT) for a in request.annotations)


def _read(word: str, known: Collection[int]) -> int:
    if not _ID.fullmatch(word):
        raise InvalidRequestError(
            f"nvext.annotations: {NEXT + word!r} is not allowed; expected ids of instances, hexadecimal or decimal, "
            "with commas"
        )
    readings = [int(word, base) for base in (16, 10) if base == 16 or word.isdecimal()]
    return next((each for each in readings if each in known), readings[0])
