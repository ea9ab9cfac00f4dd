"""The life of every rank but rank 0: load a part, then sleep, and run a step whenever rank 0 says so."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from trtllm_disagg.embedded.tensor_parallel.channel import Peer, watch
from trtllm_disagg.embedded.tensor_parallel.group import RankGroup, join_as_follower, leave, use_cpus
from trtllm_disagg.embedded.tensor_parallel.launch import IN_JOB
from trtllm_disagg.embedded.tensor_parallel.messages import Broken, Build, Built, RankCommand, Stop

if TYPE_CHECKING:
    from trtllm_disagg.embedded.tensor_parallel.shard import ShardOfEngine
    from trtllm_disagg.embedded.tensor_parallel.transfers import TransferService

log = logging.getLogger("trtllm_disagg.embedded")

_commands = msgspec.msgpack.Decoder(RankCommand)


def main() -> int:
    """A rank of its own process, until rank 0 ends it, or ends."""
    logging.basicConfig(level="INFO", format="%(levelname)s engine: %(message)s", stream=sys.stderr)
    group, leader = join_as_follower()
    # Also out of an MPI call that will never return. Nothing here needs to be closed.
    watch(leader, _commands, lambda _last: os._exit(0))
    if IN_JOB in sys.argv:
        threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    status = follow(group, leader)
    if status == 0 and IN_JOB in sys.argv:
        leave()
    return status


def follow(group: RankGroup, leader: Peer) -> int:
    """One engine, from Build to Stop. The exit status."""
    from trtllm_disagg.embedded.tensor_parallel.transfers import TransferService

    transfers = TransferService(leader.transfers)
    try:
        build = leader.commands.receive(_commands)
        assert isinstance(build, Build)
        shard = _build(build, group, transfers)
    except EOFError:
        return 1
    except Exception as error:
        transfers.fail(error)
        log.debug("rank %d cannot start", group.rank, exc_info=True)
        leader.commands.send(Broken(type(error).__name__, str(error)))
        _wait_for_end(leader)
        return 1
    leader.commands.send(Built())
    while True:
        try:
            command = leader.commands.receive(_commands)
        except EOFError:
            return 1
        if isinstance(command, Stop):
            return 0
        try:
            shard.execute(command)
        except Exception as error:
            log.exception("a step failed on rank %d", group.rank)
            leader.lifeline.send(Broken(type(error).__name__, str(error)))
            return 1


def _exit_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _wait_for_end(leader: Peer) -> None:
    """Rank 0 ends when it has read what is wrong; to die first would look like another reason."""
    with contextlib.suppress(EOFError, OSError):
        leader.commands.receive(_commands)


def _build(build: Build, group: RankGroup, transfers: TransferService) -> ShardOfEngine:
    from trtllm_disagg.embedded.params.llm_args import LlmArgs
    from trtllm_disagg.embedded.tensor_parallel.shard import build_shard

    args = LlmArgs.model_validate(build.args)
    use_cpus(args, group.rank)
    return build_shard(args, build.num_blocks, group, transfers)
