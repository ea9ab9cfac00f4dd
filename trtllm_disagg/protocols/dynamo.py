"""Dynamo's own keys: `disaggregated_params` in prefill's answer, `prefill_result` or `rendezvous` in a request."""

from __future__ import annotations

from typing import Any

from trtllm_disagg.types import Errand, GenerateRequest, Handoff, Rendezvous, TokenChunk
from trtllm_disagg.wire import encode_request


class DynamoProtocol:
    def encode(self, request: GenerateRequest, errand: Errand) -> dict[str, Any]:
        return encode_request(request, errand)

    def answer(self, handoff: Handoff, num_prompt: int) -> TokenChunk:
        return handoff.as_chunk(num_prompt)

    def meeting(self, rendezvous: Rendezvous) -> Rendezvous:
        return rendezvous


DYNAMO = DynamoProtocol()
