"""Reads and checks a handoff, prefill result or rendezvous in any protocol.

A worker reads all protocols, whichever it writes, and refuses a request with more than one handoff.
"""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import msgspec

from trtllm_disagg.errors import ConfigError, HandoffRefusedError
from trtllm_disagg.types import (
    KvTransferParams,
    PrefillResult,
    PromptTokensDetails,
    Rendezvous,
    TokenChunk,
    WireRequest,
)
from trtllm_disagg.wire.kv_handle import KvHandle, decode_handle, join_endpoint, split_endpoint

# A handoff as vLLM's `kv_transfer_params`: writing and reading.
#
# Its plain fields show proxies that read the body where the KV is. Engines use the handle, which is bound to prompt,
# sender and lease; a handoff with plain fields that differ from its handle is refused.


Params = dict[str, Any]

_NOWHERE: Params = {
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def params_for_prefill(*, remote_decode: bool) -> Params:
    """For the prefill body. `remote_decode`: a decode worker will fetch the KV."""
    return {"do_remote_decode": remote_decode, "do_remote_prefill": False} | _NOWHERE


def params_with_handoff(result: PrefillResult) -> Params:
    """For prefill's answer and the decode body. The place is null unless the handle is the embedded engine's."""
    details = result.prompt_tokens_details
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        **_place_of(result.disaggregated_params),
        "remote_handle": result.disaggregated_params,
        "remote_cached_tokens": details.cached_tokens if details is not None else None,
    }


def read_params(raw: object) -> PrefillResult | None:
    """The prefill result in prefill's answer. Raises HandoffRefusedError."""
    try:
        return result_in(msgspec.convert(raw, KvTransferParams))
    except msgspec.ValidationError as error:
        raise HandoffRefusedError(f"kv_transfer_params: {error}") from None


def result_in(params: KvTransferParams) -> PrefillResult | None:
    """The prefill result; None before the prefill. Raises HandoffRefusedError. Types and ranges are checked before."""
    if params.do_remote_decode and params.do_remote_prefill:
        raise HandoffRefusedError(
            "kv_transfer_params: do_remote_decode and do_remote_prefill are both true; expected one of them"
        )
    if not params.do_remote_prefill:
        _require_place(params, _NOWHERE, "null, because no prefill was done")
        return None
    if params.remote_handle is None:
        raise HandoffRefusedError(
            "kv_transfer_params: remote_handle is missing; engines need it to find the KV"
        )
    _require_place(params, _place_of(params.remote_handle), "what its remote_handle says")
    cached = params.remote_cached_tokens
    return PrefillResult(params.remote_handle, None if cached is None else PromptTokensDetails(cached))


def _require_place(params: KvTransferParams, place: Params, expected: str) -> None:
    for name, value in place.items():
        if getattr(params, name) != value:
            raise HandoffRefusedError(f"kv_transfer_params: {name} is not as expected: {expected}")


def _place_of(disaggregated_params: Params) -> Params:
    handle = _handle_in(disaggregated_params.get("opaque_state"))
    if handle is None:
        return _NOWHERE
    host, port = split_endpoint(handle.endpoint) or (None, None)
    return {
        "remote_engine_id": handle.sender,
        "remote_block_ids": handle.blocks,
        "remote_host": host,
        "remote_port": port,
    }


def _handle_in(opaque_state: object) -> KvHandle | None:
    """None for another engine's handle, which only that engine can check."""
    try:
        return decode_handle(base64.b64decode(opaque_state, validate=True))  # type: ignore[arg-type]
    except (HandoffRefusedError, TypeError, ValueError):
        return None


# A rendezvous as bootstrap_host, bootstrap_port and bootstrap_room: writing and reading.


_KEYS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def bootstrap_keys(rendezvous: Rendezvous) -> dict[str, Any]:
    """Raises ConfigError if the prefill engine's endpoint is not host and port."""
    place = split_endpoint(str(rendezvous.ctx_info_endpoint))
    if place is None:
        raise ConfigError(
            "--handoff-protocol bootstrap needs a host and a port, and the prefill engine's endpoint is "
            f"{rendezvous.ctx_info_endpoint}; --handoff-protocol dynamo takes any endpoint"
        )
    return dict(zip(_KEYS, (*place, rendezvous.disagg_request_id), strict=True))


def room_in(wire: WireRequest) -> Rendezvous | None:
    """The rendezvous of the bootstrap keys, if any. Raises HandoffRefusedError if one is missing or no host."""
    if wire.bootstrap_room is None and wire.bootstrap_host is None and wire.bootstrap_port is None:
        return None
    given = {name: getattr(wire, name) for name in _KEYS}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise HandoffRefusedError(
            f"request: {', '.join(missing)} missing; expected all of {', '.join(_KEYS)}"
        )
    endpoint = join_endpoint(given["bootstrap_host"], given["bootstrap_port"])
    if split_endpoint(endpoint) is None:
        raise HandoffRefusedError(f"request: bootstrap_host {given['bootstrap_host']!r} is no host")
    return Rendezvous(given["bootstrap_room"], endpoint)


#: A validation error at these paths becomes HandoffRefusedError.
HANDOFF_PATHS = ("$.prefill_result", "$.kv_transfer_params", "$.rendezvous", "$.bootstrap_")


class Given(NamedTuple):
    """A request's handoff, or its announcement."""

    prefill_result: PrefillResult | None
    rendezvous: Rendezvous | None
    #: True: a decode follows this prefill, whatever `max_tokens` is.
    decode_follows: bool


def given_in(wire: WireRequest) -> Given:
    """Raises HandoffRefusedError."""
    params, room = wire.kv_transfer_params, room_in(wire)
    forms = {
        "prefill_result": wire.prefill_result,
        "kv_transfer_params": params,
        "rendezvous": wire.rendezvous,
        "bootstrap_room": room,
    }
    present = [name for name, value in forms.items() if value is not None]
    if len(present) > 1:
        raise HandoffRefusedError(f"request: has {' and '.join(present)}; expected at most one of them")
    if params is not None:
        return Given(result_in(params), None, params.do_remote_decode)
    return Given(wire.prefill_result, wire.rendezvous or room, False)


def result_of(chunk: TokenChunk) -> PrefillResult | None:
    """The prefill result in prefill's chunk; None if the chunk is the whole answer. Raises HandoffRefusedError."""
    if chunk.kv_transfer_params is not None:
        return read_params(chunk.kv_transfer_params)
    if chunk.disaggregated_params is None:
        return None
    usage = chunk.completion_usage
    details = usage.prompt_tokens_details if usage is not None else None
    return PrefillResult(chunk.disaggregated_params, details)
