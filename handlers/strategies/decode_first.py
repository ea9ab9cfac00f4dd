"""Requests are routed to decode workers, on their cache; a decode worker has a prefill worker start them."""

from trtllm_disagg.handlers.chain import chain
from trtllm_disagg.handlers.deadlines import first_token_within
from trtllm_disagg.handlers.local import LocalDecode
from trtllm_disagg.handlers.parts import Parts
from trtllm_disagg.handlers.pushing import RemotePush
from trtllm_disagg.handlers.remote import RemotePrefill
from trtllm_disagg.handlers.together import together
from trtllm_disagg.types import Generate


def build(parts: Parts) -> Generate:
    """On a decode worker."""
    decode = LocalDecode(parts.engine, repeats_first_token=parts.pushes)
    timed = first_token_within(parts.first_decode_token_timeout, decode)
    if parts.pushes:
        return together(RemotePush(parts.stage, parts.engine, parts.protocol), timed)
    prefill = RemotePrefill(parts.prefills or parts.stage, decode.drain, parts.protocol)
    return chain(prefill, timed)
