"""prefill_first: the frontend routes requests to prefill workers by their caches; these call decode workers."""

from trtllm_disagg.handlers.chain import Chain
from trtllm_disagg.handlers.concurrent import Concurrent, LocalPush
from trtllm_disagg.handlers.local import LocalPrefill
from trtllm_disagg.handlers.queued import QueuedPrefill
from trtllm_disagg.handlers.recall import Notices
from trtllm_disagg.handlers.remote import RemoteDecode, RemoteDrain, RemotePrefill
from trtllm_disagg.handlers.services import StrategyParts
from trtllm_disagg.types import Generate, PrefillPhase


def build(parts: StrategyParts) -> Generate:
    """On a prefill worker."""
    decode = RemoteDecode(parts.peers, parts.protocol)
    if parts.pushes:
        return Concurrent(LocalPush(parts.engine, parts.protocol).open_rendezvous, decode)
    return Chain(_prefill(parts), decode, decode.require_instance, parts.engine.uncached)


def _prefill(parts: StrategyParts) -> PrefillPhase:
    """On this worker; with the queue, on the first prefill worker with room, perhaps this one."""
    drain = RemoteDrain(parts.peers, parts.protocol)
    here = LocalPrefill(parts.engine, drain, seconds=parts.config.prefill_timeout)
    queue = parts.prefill_queue
    if queue is None:
        return here
    notices = Notices(parts.instance_id, recalls_unused=True)
    remote = RemotePrefill(queue.workers, drain, notices, parts.protocol)
    return QueuedPrefill(queue, remote, here, parts.config.on_missing_stage == "fail", parts.instance_id)
