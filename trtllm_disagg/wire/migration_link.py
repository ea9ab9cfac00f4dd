"""Carries prompt length and seed to the worker that continues a request after a migration (decision 22)."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from trtllm_disagg.types import Migrated

#: Under this key the next worker gets the `worker_trace_link` of the last worker's answer.
_LINK = "migration_link"
#: Distinguishes our trace ids from a tracing library's.
_MARK = "7472746c6c6d6467"
_MAX_DELIVERED = 1 << 20
_HEX = re.compile(r"[0-9a-f]{16}")


class MigrationLink(NamedTuple):
    """Dynamo appends the client's tokens to the prompt and subtracts them from `max_tokens`, so it loses which were
    generated: penalties would restart, usage would count them as prompt, and prefill's sums could yield another token
    than decode's. So each answer's link has its prompt length and seed.
    """

    num_prompt: int
    #: The seed drawn by the first worker; 0: the request had a seed.
    seed: int

    def encode(self) -> dict[str, str]:
        """The link as W3C ids of 32 and 16 hexadecimal digits."""
        return {"trace_id": f"{_MARK}{self.seed:016x}", "span_id": f"{self.num_prompt:016x}"}

    @classmethod
    def read(cls, link: object) -> MigrationLink | None:
        """None for a link of another program."""
        if not isinstance(link, dict):
            return None
        trace_id, span_id = str(link.get("trace_id")), str(link.get("span_id"))
        seed = trace_id.removeprefix(_MARK)
        if not (trace_id.startswith(_MARK) and _HEX.fullmatch(seed) and _HEX.fullmatch(span_id)):
            return None
        return cls(int(span_id, 16), int(seed, 16))


def before_migration(raw: dict[str, Any]) -> tuple[dict[str, Any], Migrated | None]:
    """(the body before its migration, what was removed); (the body, None) without our link."""
    if _LINK not in raw:
        return raw, None
    link, tokens = MigrationLink.read(raw[_LINK]), raw.get("token_ids")
    if link is None or not isinstance(tokens, list) or not 0 < link.num_prompt <= len(tokens):
        return raw, None
    delivered = tokens[link.num_prompt :]
    body = {key: value for key, value in raw.items() if key != _LINK}
    body["token_ids"] = tokens[: link.num_prompt]
    stop, sampling = (_group(raw, name) for name in ("stop_conditions", "sampling_options"))
    if isinstance(limit := stop.get("max_tokens"), int):
        body["stop_conditions"] = stop | {"max_tokens": limit + len(delivered)}
    if link.seed and sampling.get("seed") is None:
        body["sampling_options"] = sampling | {"seed": link.seed}
    return body, Migrated(delivered, link.seed)


def length_of_prompt(raw: dict[str, Any], count: int) -> int:
    """The number of prompt tokens among `count`; all, if the link would leave more than any engine generates."""
    link = MigrationLink.read(raw[_LINK]) if _LINK in raw else None
    if link is None or not 0 < link.num_prompt <= count <= link.num_prompt + _MAX_DELIVERED:
        return count
    return link.num_prompt


def _group(raw: dict[str, Any], name: str) -> dict[str, Any]:
    given = raw.get(name)
    return given if isinstance(given, dict) else {}
