"""Reads a handoff, in whichever protocol it is written.

All of them say the same two things, a prefill result or a meeting, and all are checked here alike. So a worker
takes what it can recognise, whatever it writes itself; what says something twice is refused.
"""

from __future__ import annotations

from typing import NamedTuple

from trtllm_disagg.errors import HandoffRefusedError
from trtllm_disagg.protocols.kv_params import read_params, result_in
from trtllm_disagg.protocols.rooms import room_in
from trtllm_disagg.types import PrefillResult, Rendezvous, TokenChunk, WireRequest

#: An error at one of these paths is a bad handoff, whatever else the request asks for.
HANDOFF_PATHS = ("$.prefill_result", "$.kv_transfer_params", "$.rendezvous", "$.bootstrap_")


class Given(NamedTuple):
    """What a request brings for its phase."""

    prefill_result: PrefillResult | None
    rendezvous: Rendezvous | None
    #: A decode comes after this prefill, whatever `max_tokens` says.
    goes_on: bool


def given_in(wire: WireRequest) -> Given:
    """Raise HandoffRefusedError."""
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
    """What prefill's answer hands over; None when it is the whole answer. Raise HandoffRefusedError."""
    if chunk.kv_transfer_params is not None:
        return read_params(chunk.kv_transfer_params)
    if chunk.disaggregated_params is None:
        return None
    usage = chunk.completion_usage
    details = usage.prompt_tokens_details if usage is not None else None
    return PrefillResult(chunk.disaggregated_params, details)
