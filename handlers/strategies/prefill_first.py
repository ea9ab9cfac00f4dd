"""prefill_first: the frontend routes requests to prefill workers, by their caches; these call decode workers."""

from trtllm_disagg.handlers.chain import chain
from trtllm_disagg.handlers.concurrent import LocalPush, concurrent
from trtllm_disagg.handlers.local import LocalPrefill, prefill_within
from trtllm_disagg.handlers.recall import QueueRecalls
from trtllm_disagg.handlers.remote import (
    RemoteDecode,
    RemoteDrain,
    RemotePrefill,
    queued,
    requiring_decode_worker,
)
from trtllm_disagg.handlers.services import StrategyParts
from trtllm_disagg.types import Generate, PrefillPhase


def build(parts: StrategyParts) -> Generate:
    """On a prefill worker."""
    decode = RemoteDecode(parts.stage, parts.protocol)
    if parts.pushes:
        return concurrent(LocalPush(parts.engine, parts.protocol), decode)
    return chain(requiring_decode_worker(parts.stage, _prefill(parts)), decode)


def _prefill(parts: StrategyParts) -> PrefillPhase:
    """On this worker; with the queue, on the first prefill worker with room, which may be this one."""
    drain = RemoteDrain(parts.stage, parts.protocol)
    here = prefill_within(parts.prefill_timeout, LocalPrefill(parts.engine, drain))
    if parts.prefill_queue is None:
        return here
    recalls = QueueRecalls(parts.instance_id)
    return queued(RemotePrefill(parts.prefill_queue, drain, parts.protocol, recalls), here)
