"""A worker on the stand-in of TensorRT-LLM with all hard edges; it takes a worker's arguments.

On SIGUSR1 its engine dies, on SIGUSR2 it hangs but reports that it is well; neither ever shuts down. On LEASE_ENDS its
Dynamo runtime ends, as after a lost lease in etcd. Workers move KV through the directory KV_DIRECTORY. With NEVER_LOADS
its engine loads for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Literal

from dynamo.runtime import DistributedRuntime

from tests.support.house_walls import watch_imports
from tests.support.mounted_recording import mounted_recording_llm
from trtllm_disagg.common.cli import main
from trtllm_disagg.dynamo_runtime import worker_endpoint
from trtllm_disagg.engines.recording.hard_edges import GENERATION_TRANSFER_ERROR, RequestError
from trtllm_disagg.engines.recording.image_prompts import Images, are_of
from trtllm_disagg.engines.recording.llm import LLM
from trtllm_disagg.engines.recording.result import RequestOutput, checksum
from trtllm_disagg.engines.recording.state import KvStore, Meeting

KV_DIRECTORY = "TEST_KV_DIRECTORY"
NEVER_LOADS = "TEST_NEVER_LOADS"
LOADS = "the engine loads, and does not end to; its ranks:"


class FileEvent(asyncio.Event):
    """An event of two processes: set if the file exists."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.set = path.touch  # type: ignore[method-assign]
        self.is_set = path.exists  # type: ignore[method-assign]

    async def wait(self) -> Literal[True]:
        while not self.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return True


class KvFiles(KvStore):
    """One file with the prompt per held context. They outlive every worker, since no lease ends."""

    #: If this file exists, the next transfer breaks.
    BREAKS = "breaks"
    #: Stops the process with this id when the next prefill ends, so that it never sees the answer.
    STOPS = "stops"

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._numbers = itertools.count(1)

    def meeting(self, request_id: int | None) -> Meeting:
        return Meeting(*(FileEvent(self._directory / f"{what}-{request_id}") for what in ("wanted", "sent")))

    def hold(self, prompt: list[int], owner: object = None, seconds: float | None = None) -> bytes:
        name = f"kv-{os.getpid()}-{next(self._numbers)}"
        (self._directory / name).write_text(json.dumps(prompt))
        with contextlib.suppress(FileNotFoundError):
            stopped = self._directory / self.STOPS
            os.kill(int(stopped.read_text()), signal.SIGSTOP)
            stopped.unlink()
        return name.encode()

    def take(self, name: bytes | None, prompt: list[int]) -> list[int] | None:
        held = self._directory / (name or b"none").decode()
        try:
            given: list[int] = json.loads(held.read_text())
            held.unlink()
            (self._directory / self.BREAKS).unlink()
        except FileNotFoundError as missing:
            if missing.filename != str(held) and are_of(given, prompt):
                return given
        raise RequestError(GENERATION_TRANSFER_ERROR)

    def release(self, name: bytes) -> None:
        (self._directory / name.decode()).unlink(missing_ok=True)

    def clear(self) -> None:
        """Does nothing: an ending worker leaves its contexts to the test."""


def held_in(directory: Path) -> int:
    return sum(1 for _ in directory.glob("kv-*"))


#: A rank that started another one; both ignore SIGTERM.
RANKS = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if other := os.fork():
    print(os.getpid(), other, flush=True)
while True:
    signal.pause()
"""


class NeverLoads:
    """An LLM with a constructor that never returns, a thread that Python waits for at exit, and ranks."""

    def __init__(self, **engine_args: object) -> None:
        threading.Thread(target=threading.Event().wait).start()
        ranks = subprocess.Popen([sys.executable, "-c", RANKS], stdout=subprocess.PIPE, text=True)
        assert ranks.stdout is not None
        print(LOADS, ranks.stdout.readline(), flush=True)
        threading.Event().wait()


class WithCache(LLM):
    """Each ended request gives one statistic, of its prompt's tokens, and one event, of its prompt's blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._event_ids = itertools.count()

    def keep(self, tokens: list[int], salt: str, images: Images) -> None:
        """Emit the request's event."""

    def step_ended(self, ended: RequestOutput) -> None:
        prompt, size = ended.prompt_token_ids, self.args.kv_cache_config.tokens_per_block
        if self.args.enable_iter_perf_stats:
            held = {"usedNumBlocks": self.held_contexts, "maxNumBlocks": 1024}
            batch = {"numCtxTokens": len(prompt)}
            self.stats.append({"numActiveRequests": 0, "inflightBatchingStats": batch, "kvCacheStats": held})
        if self.args.kv_cache_config.event_buffer_max_size:
            hashes = [checksum(prompt[: end + size]) for end in range(0, len(prompt) - size + 1, size)]
            blocks = [
                {"block_hash": each, "tokens": [{"token_id": token} for token in prompt[at : at + size]]}
                for each, at in zip(hashes, itertools.count(0, size), strict=False)
            ]
            data = {"type": "stored", "parent_hash": None, "blocks": blocks}
            self.kv_cache_events.append({"event_id": next(self._event_ids), "data": data})


#: All of Dynamo's runtimes.
RUNTIMES: list[Any] = []


def _opened(*args: Any, **kwargs: Any) -> Any:
    RUNTIMES.append(DistributedRuntime(*args, **kwargs))
    return RUNTIMES[-1]


STANDS_STILL = "the engine stands still, and is well"
#: Signals for the engine's end.
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
LEASE_ENDS = signal.SIGRTMIN


def _end_at_the_signal() -> None:
    while (received := signal.sigwait((*SIGNALS, LEASE_ENDS))) == LEASE_ENDS:
        RUNTIMES[-1].shutdown()
    for llm in LLM.instances:
        llm.may_shut_down.clear()
        if received == signal.SIGUSR2:
            llm.stands_still = True
            print(STANDS_STILL, flush=True)
        else:
            llm.die(RuntimeError("rank 3 is gone"))


if __name__ == "__main__":
    # Only for that thread; the others inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, LEASE_ENDS))
    vars(worker_endpoint)["DistributedRuntime"] = _opened
    threading.Thread(target=_end_at_the_signal, daemon=True).start()
    if KV_DIRECTORY in os.environ:
        LLM.kv_store = KvFiles(Path(os.environ[KV_DIRECTORY]))
    with mounted_recording_llm() as tensorrt_llm:
        vars(tensorrt_llm)["LLM"] = NeverLoads if NEVER_LOADS in os.environ else WithCache
        watch_imports()
        main(["worker", *sys.argv[1:]])
