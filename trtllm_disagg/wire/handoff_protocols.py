"""What a handoff protocol decides: how a handoff is written. Reading is the same for all (`handoff_formats.py`)."""

from __future__ import annotations

import secrets
from typing import Any, Protocol

import msgspec

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.types import GenerateRequest, Handoff, PhaseRequest, Rendezvous, TokenChunk
from trtllm_disagg.wire.bodies import encode_request
from trtllm_disagg.wire.handoff_formats import asking, handing_over, keys_of


class HandoffProtocol(Protocol):
    """One of them, chosen once at construction. It never changes what it is given."""

    def encode(self, request: GenerateRequest, phase_request: PhaseRequest) -> dict[str, Any]:
        """The body for another worker: as the request came, and what this phase needs besides."""
        ...

    def answer(self, handoff: Handoff, num_prompt: int) -> TokenChunk:
        """A prefill worker's one chunk. A final answer looks the same in all protocols."""
        ...

    def adapt(self, rendezvous: Rendezvous) -> Rendezvous:
        """The same in words that `encode` has. Raises ConfigError when it has none for it."""
        ...


# Dynamo's own keys: `disaggregated_params` in prefill's answer, `prefill_result` or `rendezvous` in a request.


class DynamoProtocol:
    def encode(self, request: GenerateRequest, phase_request: PhaseRequest) -> dict[str, Any]:
        return encode_request(request, phase_request)

    def answer(self, handoff: Handoff, num_prompt: int) -> TokenChunk:
        return handoff.as_chunk(num_prompt)

    def adapt(self, rendezvous: Rendezvous) -> Rendezvous:
        return rendezvous


DYNAMO = DynamoProtocol()


# SGLang's concurrent protocol: the same `bootstrap_host`, `bootstrap_port` and `bootstrap_room` in both bodies.


#: Smaller ids are the engines' own.
_FIRST_ROOM = 1 << 40
_NO_ROOM = 1 << 63


class BootstrapProtocol:
    def encode(self, request: GenerateRequest, phase_request: PhaseRequest) -> dict[str, Any]:
        body = encode_request(msgspec.structs.replace(request, rendezvous=None), phase_request)
        return body if request.rendezvous is None else body | keys_of(request.rendezvous)

    def answer(self, handoff: Handoff, num_prompt: int) -> TokenChunk:
        return handoff.as_chunk(num_prompt)

    def adapt(self, rendezvous: Rendezvous) -> Rendezvous:
        """At random: a sender that knows a room can write into what is offered there, so none can be guessed."""
        room = _FIRST_ROOM + secrets.randbelow(_NO_ROOM - _FIRST_ROOM)
        met = msgspec.structs.replace(rendezvous, disagg_request_id=room)
        keys_of(met)
        return met


# The sequential protocol of vLLM and llm-d: `kv_transfer_params` in prefill's body, its answer, decode's body.


_KEY = "kv_transfer_params"
#: Where a body has them, OpenAI's keys are changed too: a reader of those must see one token as well.
_LIMITS = ("max_tokens", "max_completion_tokens")
_LEFT_OUT = ("stream_options",)


class TwoPhaseProtocol:
    def encode(self, request: GenerateRequest, phase_request: PhaseRequest) -> dict[str, Any]:
        """The fields that prefill sees changed are in decode's body as they came: both are made from `raw`."""
        body = encode_request(msgspec.structs.replace(request, prefill_result=None), phase_request)
        if phase_request.stage == "prefill":
            # An answer of one token is prefill's alone, and no KV has to be kept for it.
            return _of_one_token(body) | {_KEY: asking(remote_decode=request.stop.max_tokens != 1)}
        if request.prefill_result is not None:
            return body | {_KEY: handing_over(request.prefill_result)}
        return body

    def answer(self, handoff: Handoff, num_prompt: int) -> TokenChunk:
        chunk = handoff.as_chunk(num_prompt)
        if handoff.result is None:
            return chunk
        return msgspec.structs.replace(
            chunk, disaggregated_params=None, kv_transfer_params=handing_over(handoff.result)
        )

    def adapt(self, rendezvous: Rendezvous) -> Rendezvous:
        raise ConfigError.bad_value(
            "--handoff-protocol", "two_phase", "dynamo or bootstrap with --schedule-style generation_first"
        )


def _of_one_token(body: dict[str, Any]) -> dict[str, Any]:
    changed = {name: value for name, value in body.items() if name not in _LEFT_OUT}
    changed |= {name: 1 for name in _LIMITS if name in body}
    changed |= {"stream": False} if "stream" in body else {}
    stop_conditions = _at_most_one_at_least(body.get("stop_conditions") or {})
    return _at_most_one_at_least(changed) | {"stop_conditions": stop_conditions | {"max_tokens": 1}}


def _at_most_one_at_least(options: dict[str, Any]) -> dict[str, Any]:
    return options | ({"min_tokens": 1} if options.get("min_tokens") else {})


# Which protocol `--handoff-protocol` means.


PROTOCOLS: dict[str, HandoffProtocol] = {
    "dynamo": DYNAMO,
    "two_phase": TwoPhaseProtocol(),
    "bootstrap": BootstrapProtocol(),
}


def choose_protocol(name: str) -> HandoffProtocol:
    return PROTOCOLS[name]
