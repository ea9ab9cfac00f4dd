"""Requests are routed to decode workers, on their cache; a decode worker has a prefill worker start them."""

from trtllm_disagg.handlers.chain import chain
from trtllm_disagg.handlers.concurrent import RemotePush, concurrent
from trtllm_disagg.handlers.local import LocalDecode, first_token_within
from trtllm_disagg.handlers.recall import Notices
from trtllm_disagg.handlers.remote import RemotePrefill, queued
from trtllm_disagg.handlers.route import names_prefill
from trtllm_disagg.handlers.services import StrategyParts
from trtllm_disagg.types import Generate, PrefillPhase


def build(parts: StrategyParts) -> Generate:
    """On a decode worker."""
    decode = LocalDecode(parts.engine, repeats_first_token=parts.pushes)
    timed = first_token_within(parts.first_decode_token_timeout, decode)
    if parts.pushes:
        return concurrent(RemotePush(parts.stage, parts.engine, parts.protocol), timed)
    prefill: PrefillPhase = RemotePrefill(
        parts.stage, decode.drain, parts.protocol, Notices(parts.instance_id)
    )
    if parts.prefills is not None:
        through = RemotePrefill(parts.prefills, decode.drain, parts.protocol)
        prefill = queued(through, prefill, passes_by=names_prefill)
    return chain(prefill, timed)
