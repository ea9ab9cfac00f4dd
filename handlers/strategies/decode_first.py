"""Requests are routed to decode workers, on their cache; a decode worker has a prefill worker start them."""

from trtllm_disagg.config import Role
from trtllm_disagg.engine import Engine
from trtllm_disagg.handlers.chain import bare_prefill, chain
from trtllm_disagg.handlers.local import LocalDecode, LocalPrefill
from trtllm_disagg.handlers.remote import RemotePrefill, StageClient
from trtllm_disagg.types import Generate


def build(role: Role, engine: Engine, client: StageClient) -> Generate:
    if role is Role.PREFILL:
        return bare_prefill(LocalPrefill(engine))
    decode = LocalDecode(engine, repeats_first_token=False)
    return chain(RemotePrefill(client, decode.drain), decode)
