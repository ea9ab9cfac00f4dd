"""A handoff as vLLM's `kv_transfer_params`, there and back.

Its plain fields say where the KV is, for whoever looks at a body on its way. Engines go by the handle, which is
bound to prompt, sender and lease; so the plain fields have to say what the handle says, or all of it is refused.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from trtllm_disagg.errors import HandoffRefusedError
from trtllm_disagg.kv_transfer.endpoint import split_endpoint
from trtllm_disagg.kv_transfer.handle import KvHandle, decode_handle
from trtllm_disagg.types import KvTransferParams, PrefillResult, PromptTokensDetails

Params = dict[str, Any]

_NOWHERE: Params = {
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def asking(*, remote_decode: bool) -> Params:
    """For prefill's body: whether somebody will come for the KV."""
    return {"do_remote_decode": remote_decode, "do_remote_prefill": False} | _NOWHERE


def handing_over(result: PrefillResult) -> Params:
    """For prefill's answer, and for decode's body. An engine whose handle is opaque to us has null for a place."""
    details = result.prompt_tokens_details
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        **_place_of(result.disaggregated_params),
        "remote_handle": result.disaggregated_params,
        "remote_cached_tokens": details.cached_tokens if details is not None else None,
    }


def read_params(raw: object) -> PrefillResult | None:
    """From prefill's answer. Raise HandoffRefusedError."""
    try:
        return result_in(msgspec.convert(raw, KvTransferParams))
    except msgspec.ValidationError as error:
        raise HandoffRefusedError(f"kv_transfer_params: {error}") from None


def result_in(params: KvTransferParams) -> PrefillResult | None:
    """None where prefill has yet to be done. Raise HandoffRefusedError; types and ranges are checked already."""
    if params.do_remote_decode and params.do_remote_prefill:
        raise HandoffRefusedError(
            "kv_transfer_params: do_remote_decode and do_remote_prefill are both true; expected one of them"
        )
    if not params.do_remote_prefill:
        _require_place(params, _NOWHERE, "null, because no prefill was done")
        return None
    if params.remote_handle is None:
        raise HandoffRefusedError(
            "kv_transfer_params: remote_handle is missing; without it no engine finds the KV"
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
    """None for what the embedded engine has not made; whether an engine takes it is the engine's word."""
    try:
        return decode_handle(base64.b64decode(opaque_state, validate=True))  # type: ignore[arg-type]
    except (HandoffRefusedError, TypeError, ValueError):
        return None
