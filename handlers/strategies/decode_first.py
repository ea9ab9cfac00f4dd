"""decode_first: the frontend routes requests to decode workers by their caches; these call prefill workers."""

from trtllm_disagg.handlers.chain import Chain
from trtllm_disagg.handlers.concurrent import Concurrent, RemotePush
from trtllm_disagg.handlers.idle_timeout import first_decode_token_seconds
from trtllm_disagg.handlers.local import LocalDecode
from trtllm_disagg.handlers.queued import QueuedPrefill
from trtllm_disagg.handlers.recall import Notices
from trtllm_disagg.handlers.remote import RemotePrefill
from trtllm_disagg.handlers.selection import names_prefill
from trtllm_disagg.handlers.services import StrategyParts
from trtllm_disagg.types import Generate, PrefillPhase


def build(parts: StrategyParts) -> Generate:
    """On a decode worker."""
    decode = LocalDecode(
        parts.engine,
        repeats_first_token=parts.pushes,
        first_token_seconds=first_decode_token_seconds(parts.config),
        prefill_workers=parts.peers,
        max_batch_size=parts.config.max_batch_size,
    )
    if parts.pushes:
        return Concurrent(RemotePush(parts.peers, parts.engine, parts.protocol).open_rendezvous, decode)
    remote = RemotePrefill(parts.peers, decode.drain, Notices(parts.instance_id), parts.protocol)
    prefill: PrefillPhase = remote
    if parts.prefill_queue is not None:
        waits = parts.config.on_missing_stage == "fail"
        prefill = QueuedPrefill(parts.prefill_queue, remote, remote, waits, pins_workers=names_prefill)
    return Chain(prefill, decode, uncached=parts.engine.uncached)
