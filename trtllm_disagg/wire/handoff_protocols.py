"""The handoff protocols: each writes its own form; one reader reads all (`handoff_formats.py`)."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.types import GenerateRequest, Handoff, PhaseRequest, Rendezvous, TokenChunk
from trtllm_disagg.wire.bodies import encode_request
from trtllm_disagg.wire.handoff_formats import bootstrap_keys, params_for_prefill, params_with_handoff


class HandoffProtocol:
    """Chosen at a worker's construction; never changes its arguments. This one uses Dynamo's keys:
    `disaggregated_params` in prefill's answer, `prefill_result` or `rendezvous` in a request.
    """

    def encode(self, request: GenerateRequest, phase_request: PhaseRequest) -> dict[str, Any]:
        """The body for another worker: the request as it came, and what its phase needs."""
        return encode_request(request, phase_request)

    def answer(self, handoff: Handoff, num_prompt: int) -> TokenChunk:
        """A prefill worker's only chunk. A final answer is the same in all protocols."""
        return handoff.as_chunk(num_prompt)

    def adapt(self, rendezvous: Rendezvous) -> Rendezvous:
        """A rendezvous that `encode` can write. Raises ConfigError if the protocol cannot express it."""
        return rendezvous


DYNAMO = HandoffProtocol()


# SGLang's concurrent protocol: the same `bootstrap_host`, `bootstrap_port` and `bootstrap_room` in both bodies.


#: Engines generate smaller ids.
_FIRST_ROOM = 1 << 40
_NO_ROOM = 1 << 63


class BootstrapProtocol(HandoffProtocol):
    def encode(self, request: GenerateRequest, phase_request: PhaseRequest) -> dict[str, Any]:
        body = encode_request(msgspec.structs.replace(request, rendezvous=None), phase_request)
        return body if request.rendezvous is None else body | bootstrap_keys(request.rendezvous)

    def adapt(self, rendezvous: Rendezvous) -> Rendezvous:
        """With a secret random room: a sender that knows it can write into the blocks offered there."""
        room = _FIRST_ROOM + secrets.randbelow(_NO_ROOM - _FIRST_ROOM)
        adapted = msgspec.structs.replace(rendezvous, disagg_request_id=room)
        bootstrap_keys(adapted)  # raises ConfigError
        return adapted


# The sequential protocol of vLLM and llm-d: `kv_transfer_params` in prefill's body, its answer, decode's body.


_KEY = "kv_transfer_params"
#: OpenAI's keys, changed too if present, so that their readers also see one token.
_LIMITS = ("max_tokens", "max_completion_tokens")
_LEFT_OUT = ("stream_options",)


class TwoPhaseProtocol(HandoffProtocol):
    def encode(self, request: GenerateRequest, phase_request: PhaseRequest) -> dict[str, Any]:
        """The decode body keeps the fields changed for prefill: both bodies are made from `raw`."""
        body = encode_request(msgspec.structs.replace(request, prefill_result=None), phase_request)
        if phase_request.phase == "prefill":
            # Prefill alone answers one token; no KV has to be kept.
            return _of_one_token(body) | {
                _KEY: params_for_prefill(remote_decode=request.stop.max_tokens != 1)
            }
        if request.prefill_result is not None:
            return body | {_KEY: params_with_handoff(request.prefill_result)}
        return body

    def answer(self, handoff: Handoff, num_prompt: int) -> TokenChunk:
        chunk = handoff.as_chunk(num_prompt)
        if handoff.result is None:
            return chunk
        return msgspec.structs.replace(
            chunk, disaggregated_params=None, kv_transfer_params=params_with_handoff(handoff.result)
        )

    def adapt(self, rendezvous: Rendezvous) -> Rendezvous:
        raise ConfigError.bad_value(
            "--handoff-protocol", "two_phase", "dynamo or bootstrap with --schedule-style generation_first"
        )


def _of_one_token(body: dict[str, Any]) -> dict[str, Any]:
    changed = {name: value for name, value in body.items() if name not in _LEFT_OUT}
    changed |= {name: 1 for name in _LIMITS if name in body}
    changed |= {"stream": False} if "stream" in body else {}
    stop_conditions = _min_tokens_capped(body.get("stop_conditions") or {})
    return _min_tokens_capped(changed) | {"stop_conditions": stop_conditions | {"max_tokens": 1}}


def _min_tokens_capped(options: dict[str, Any]) -> dict[str, Any]:
    """`options` with min_tokens at most 1."""
    return options | ({"min_tokens": 1} if options.get("min_tokens") else {})


#: The values of `--handoff-protocol`.
PROTOCOLS: dict[str, HandoffProtocol] = {
    "dynamo": DYNAMO,
    "two_phase": TwoPhaseProtocol(),
    "bootstrap": BootstrapProtocol(),
}


def choose_protocol(name: str) -> HandoffProtocol:
    return PROTOCOLS[name]
