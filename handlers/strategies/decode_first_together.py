"""decode_first with schedule style generation_first: a prefill worker writes into the decode worker's blocks."""

from trtllm_disagg.config import Role
from trtllm_disagg.engine import Engine
from trtllm_disagg.handlers.local import LocalDecode
from trtllm_disagg.handlers.pushing import LocalPush, RemotePush, bare_push
from trtllm_disagg.handlers.remote import StageClient
from trtllm_disagg.handlers.together import together
from trtllm_disagg.types import Generate


def build(role: Role, engine: Engine, client: StageClient) -> Generate:
    if role is Role.PREFILL:
        return bare_push(LocalPush(engine))
    return together(RemotePush(client, engine), LocalDecode(engine, repeats_first_token=True))
