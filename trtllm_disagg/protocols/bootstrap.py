"""SGLang's concurrent protocol: the same `bootstrap_host`, `bootstrap_port` and `bootstrap_room` in both bodies."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import msgspec

from trtllm_disagg.protocols.rooms import keys_of
from trtllm_disagg.types import Errand, GenerateRequest, Handoff, Rendezvous, TokenChunk
from trtllm_disagg.wire import encode_request

#: Smaller ids are the engines' own.
_FIRST_ROOM = 1 << 40
_NO_ROOM = 1 << 63


class BootstrapProtocol:
    def encode(self, request: GenerateRequest, errand: Errand) -> dict[str, Any]:
        body = encode_request(replace(request, rendezvous=None), errand)
        return body if request.rendezvous is None else body | keys_of(request.rendezvous)

    def answer(self, handoff: Handoff, num_prompt: int) -> TokenChunk:
        return handoff.as_chunk(num_prompt)

    def meeting(self, rendezvous: Rendezvous) -> Rendezvous:
        """At random: who knows a room can write into what is offered there, so none can be guessed."""
        room = _FIRST_ROOM + secrets.randbelow(_NO_ROOM - _FIRST_ROOM)
        met = msgspec.structs.replace(rendezvous, disagg_request_id=room)
        keys_of(met)
        return met
