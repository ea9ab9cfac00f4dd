"""prefill_first: the frontend routes requests to prefill workers, by their caches; these call decode workers."""

from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.engine.capabilities import EXPORTS_CACHED, block_size_of
from trtllm_disagg.errors import ConfigError
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
    decode = RemoteDecode(parts.peers, parts.protocol)
    if parts.pushes:
        return Concurrent(LocalPush(parts.engine, parts.protocol).open_rendezvous, decode)
    return Chain(_prefill(parts), decode, decode.require_instance, _pull_back(parts))


def _prefill(parts: StrategyParts) -> PrefillPhase:
    """On this worker; with the queue, on the first prefill worker with room, which may be this one."""
    drain = RemoteDrain(parts.peers, parts.protocol)
    here = LocalPrefill(parts.engine, drain, seconds=parts.config.prefill_timeout)
    if parts.prefill_queue is None:
        return here
    notices = Notices(parts.instance_id, recalls_unused=True)
    return QueuedPrefill(RemotePrefill(parts.prefill_queue, drain, notices, parts.protocol), here)


def _pull_back(parts: StrategyParts) -> PullBack | None:
    """None where prefills compute what decode workers have. Raises ConfigError when the user wants something else and
    the engine cannot; the default asks for nothing.
    """
    config, least = parts.config, parts.config.pull_min_tokens
    if EXPORTS_CACHED not in parts.engine.capabilities:
        if least and config.is_explicit("pull_min_tokens"):
            allowed = f"0 with {parts.engine.api.name}, which cannot {EXPORTS_CACHED.name}"
            raise ConfigError.bad_value(flag_of("pull_min_tokens"), least, allowed)
        return None
    # Which worker prefills is not known before the prefill queue has given the request to one.
    if not least or parts.prefill_queue is not None:
        return None
    return PullBack(parts.peers, block_size_of(parts.engine.llm) or config.kv_block_size, least)
