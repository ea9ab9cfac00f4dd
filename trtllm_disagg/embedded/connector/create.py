"""The embedded engine's KV connector, made from its arguments; or the null one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from trtllm_disagg.embedded.connector.connector import KvConnector, NullKvConnector
from trtllm_disagg.embedded.connector.two_sided import TwoSidedConnector, timeouts_of
from trtllm_disagg.embedded.model.sizing import PoolShape
from trtllm_disagg.embedded.params.llm_args import LlmArgs
from trtllm_disagg.embedded.params.supported_args import scope_of
from trtllm_disagg.embedded.tensor_parallel.channel import Peer
from trtllm_disagg.embedded.tensor_parallel.transfers import TeamTransport
from trtllm_disagg.kv_transfer.base import KvLayout, KvTimeouts, StagingTransport
from trtllm_disagg.kv_transfer.host import new_memory
from trtllm_disagg.kv_transfer.transports import create_transport, is_needed


def create_connector(
    args: LlmArgs,
    layout: KvLayout,
    pool: PoolShape,
    wake: Callable[[], None],
    peers: Seq[Peer] = (),
    *,
    transport: StagingTransport | None = None,
    timeouts: KvTimeouts | None = None,
) -> tuple[KvConnector, torch.Tensor]:
    """The connector and the pool, which must live in memory that the transport can serve.

    `peers` are the other ranks, with pools of their own. `transport` and `timeouts` instead of those of `args`.
    """
    config = args.cache_transceiver_config
    if config is None or config.backend is None:
        return NullKvConnector(), new_memory(pool.shape, pool.dtype, pool.device)
    scope = scope_of(args)
    chosen = transport or create_transport(
        config.backend,
        scope,
        needs_cma=is_needed(scope, pool.device.type),
        on_gpu=pool.device.type == "cuda",
    )
    team = TeamTransport(chosen, peers)
    kv = team.allocate(pool.shape, pool.dtype, pool.device)
    connector = TwoSidedConnector(
        team,
        layout,
        pool.num_blocks,
        authentication=scope.authentication(),
        timeouts=timeouts or timeouts_of(config),
        takes_offers=args.tensor_parallel_size == 1,
        wake=wake,
    )
    return connector, kv
