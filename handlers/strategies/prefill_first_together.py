"""prefill_first with schedule style generation_first: a prefill worker writes into a decode worker's blocks."""

from trtllm_disagg.config import Role
from trtllm_disagg.engine import Engine
from trtllm_disagg.handlers.chain import bare_decode
from trtllm_disagg.handlers.local import LocalDecode
from trtllm_disagg.handlers.pushing import LocalPush
from trtllm_disagg.handlers.remote import RemoteDecode, StageClient
from trtllm_disagg.handlers.together import together
from trtllm_disagg.types import Generate


def build(role: Role, engine: Engine, client: StageClient) -> Generate:
    if role is Role.PREFILL:
        return together(LocalPush(engine), RemoteDecode(client))
    return bare_decode(LocalDecode(engine, repeats_first_token=True))
