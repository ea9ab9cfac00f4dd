"""decode_first: the frontend routes requests to decode workers, by their caches; these call prefill workers."""

from trtllm_disagg.handlers.chain import chain
from trtllm_disagg.handlers.circuit_breaker import counting_lost_kv
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
    if parts.prefill_queue is not None:
        through_queue = RemotePrefill(parts.prefill_queue, decode.drain, parts.protocol)
        prefill = queued(through_queue, prefill, bypasses_queue=names_prefill)
    return chain(prefill, counting_lost_kv(parts.breaker, timed))
