"""prefill_first: the frontend routes requests to prefill workers, by their caches; these call decode workers."""

from trtllm_disagg.handlers.chain import Chain
from trtllm_disagg.handlers.concurrent import Concurrent, LocalPush
from trtllm_disagg.handlers.local import LocalPrefill
from trtllm_disagg.handlers.multi_turn import PullBack
from trtllm_disagg.handlers.recall import Notices
from trtllm_disagg.handlers.remote import QueuedPrefill, RemoteDecode, RemoteDrain, RemotePrefill
from trtllm_disagg.handlers.services import StrategyParts
from trtllm_disagg.types import Generate, PrefillPhase


def build(parts: StrategyParts) -> Generate:
    """On a prefill worker."""
    if parts.pushes:
        decode = RemoteDecode(parts.peers, parts.protocol)
        return Concurrent(LocalPush(parts.engine, parts.protocol).open_rendezvous, decode)
    if (pull := parts.pull_back()) is None:
        decode = RemoteDecode(parts.peers, parts.protocol)
    else:
        decode = RemoteDecode(parts.peers, parts.protocol, pull.answers.add)
    return Chain(_prefill(parts, pull), decode, decode.require_instance)


def _prefill(parts: StrategyParts, pull: PullBack | None) -> PrefillPhase:
    """On this worker; with the queue, on the first prefill worker with room, which may be this one."""
    drain = RemoteDrain(parts.peers, parts.protocol)
    here = LocalPrefill(parts.engine, drain, pull=pull, seconds=parts.config.prefill_timeout)
    if parts.prefill_queue is None:
        return here
    notices = Notices(parts.instance_id, recalls_unused=True)
    return QueuedPrefill(RemotePrefill(parts.prefill_queue, drain, notices, parts.protocol), here)
