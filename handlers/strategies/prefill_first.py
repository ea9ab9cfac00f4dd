"""Requests are routed to prefill workers, by their cache; a prefill worker has a decode worker go on."""

from trtllm_disagg.config import Role
from trtllm_disagg.engine import Engine
from trtllm_disagg.handlers.chain import bare_decode, chain
from trtllm_disagg.handlers.local import LocalDecode, LocalPrefill
from trtllm_disagg.handlers.remote import RemoteDecode, StageClient
from trtllm_disagg.types import Generate


def build(role: Role, engine: Engine, client: StageClient) -> Generate:
    if role is Role.PREFILL:
        return chain(LocalPrefill(engine), RemoteDecode(client))
    return bare_decode(LocalDecode(engine, repeats_first_token=False))
