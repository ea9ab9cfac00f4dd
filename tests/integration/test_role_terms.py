"""A worker's role terms on a TensorRT-LLM with hard edges: flips there and back, and a lease that is lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.integration.test_changes_under_load import flip, pinned
from tests.support.deployments import Worker, demo_config, wait_until
from tests.support.hard_worker import KV_DIRECTORY, LEASE_ENDS
from tests.support.house_walls import LOADED, loaded_in
from tests.support.load import Body
from tests.support.mounted_recording import mounted_recording_llm
from trtllm_disagg.common.interpreter import python
from trtllm_disagg.handlers.trace import REQUEST_TRACE_PREFIX
from trtllm_disagg.tools.up.lifecycle import Deployment, running_deployment
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import LOOPBACK, ProcessRole

pytestmark = pytest.mark.process

PROMPT_TOKENS, NUM_REQUESTS = 100, 8
OTHER: dict[str, ProcessRole] = {"prefill": "decode", "decode": "prefill"}

TO_BOTH = ("--max-local-prefill-length", f"{PROMPT_TOKENS // 2}")
PUSHES = (
    *("--schedule-style", "generation_first", "--override-engine-args"),
    '{"cache_transceiver_config": {"backend": "NIXL", "transceiver_runtime": "PYTHON"}}',
)
ROOT = Path(__file__).parents[2]


class Flipping:
    """A deployment of hard workers, and the one of them that flips."""

    def __init__(self, deployment: Deployment, http: httpx.AsyncClient, pages: httpx.Client) -> None:
        self.deployment = deployment
        self._http, self._pages = http, pages
        self._numbers = itertools.count(1)

    def worker(self, process: ManagedProcess) -> Worker:
        """As it is now: a page shows one role term."""
        return Worker(process, self._pages)

    async def ask(self, body: Body) -> Body:
        answer = await self._http.post(f"{self.deployment.base_url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        extra: Body = answer.json()["nvext"]
        return extra

    def new_prompt(self) -> Body:
        number = next(self._numbers)
        return {
            "model": self.deployment.config.served_model_name,
            "prompt": [number, *range(40, 39 + PROMPT_TOKENS)],
            "max_tokens": 2,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["timing", "engine_data"]},
        }

    async def all_is_told(self, process: ManagedProcess) -> None:
        """Of new requests: the statistics and the events of each one that this worker's engine has ended."""
        worker = self.worker(process)

        def counted() -> tuple[float, float, float]:
            """Requests by the statistics, by the events, and by its log."""
            tokens = worker.metric("trtllm_disagg_prefill_tokens_total")
            events = worker.metric("trtllm_kv_event_drain_batch_size_sum")
            return tokens / PROMPT_TOKENS, events, process.log.read_text().count(REQUEST_TRACE_PREFIX)

        before, deadline = counted(), time.monotonic() + 60
        # A frontend may take a while to know the worker, and divides the requests between two.
        while counted()[2] - before[2] < NUM_REQUESTS and time.monotonic() < deadline:
            await self.ask(self.new_prompt())

        def new() -> list[float]:
            return [after - each for after, each in zip(counted(), before, strict=True)]

        wait_until(
            lambda: len(set(new())) == 1 and new()[0] >= NUM_REQUESTS,
            f"{process.name} has told of all its requests",
        )
        assert worker.metric("trtllm_kv_event_id_gap_events_total") == 0

    async def hit_rate(self, process: ManagedProcess, known: Body) -> float:
        """Of a known prompt at this worker, as the frontend's router expects it."""
        told = await self.ask(pinned(known, self.worker(process).instance_id))
        rate: float = told["timing"]["kv_hit_rate"]
        return rate


@asynccontextmanager
async def flipping(
    directory: Path, strategy: str, role: ProcessRole, patch: pytest.MonkeyPatch, *worker_args: str
) -> AsyncIterator[tuple[Flipping, ManagedProcess]]:
    (directory / "kv").mkdir()
    patch.setenv(KV_DIRECTORY, str(directory / "kv"))
    patch.setenv("PYTHONPATH", str(ROOT))
    setting = demo_config(
        strategy,
        directory / "run",
        engine="tensorrt_llm",
        engine_configs={},
        worker_command=python("-m", "tests.support.hard_worker"),
        worker_args=worker_args,
        prefill_workers=1 + (role == "prefill"),
        decode_workers=1 + (role == "decode"),
    )
    # `up` asks whether the engine is installed.
    with httpx.Client(timeout=60) as pages, mounted_recording_llm():
        async with running_deployment(setting) as deployment, httpx.AsyncClient(timeout=60) as http:
            yield Flipping(deployment, http, pages), deployment.of_role(role)[1]


LISTENING, FILES_OF_A_PUBLISHER = "0A", 3


def kept_open(process: ManagedProcess) -> tuple[int, int]:
    """Number of its file descriptors without TCP connections, which come and go, and of its listening ports."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    states = {f"socket:[{row[9]}]": row[3] for row in rows}
    found = [states.get(file) for file in open_files(process)]
    return sum(state in (None, LISTENING) for state in found), found.count(LISTENING)


def open_files(process: ManagedProcess) -> Iterator[str]:
    for name in os.listdir(f"/proc/{process.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/{process.pid}/fd/{name}")


@pytest.mark.parametrize(
    ("strategy", "role", "num_flips", "flags"),
    [
        ("decode_first", "decode", 6, ()),
        ("prefill_first", "prefill", 2, ()),
        ("router", "prefill", 2, ()),
        ("auto", "decode", 2, TO_BOTH),
        ("decode_first", "decode", 2, PUSHES),
    ],
)
async def test_each_role_term_publishes_all_statistics_and_events_and_leaves_no_socket(
    strategy: str,
    role: ProcessRole,
    num_flips: int,
    flags: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_first_stage = strategy != "router"
    async with flipping(tmp_path, strategy, role, monkeypatch, *flags) as (place, flips):
        await place.all_is_told(flips)
        known = place.new_prompt()
        if is_first_stage:
            await place.ask(pinned(known, place.worker(flips).instance_id))
        seen: list[tuple[int, int]] = []
        for number in range(num_flips):
            to = OTHER[flips.role]
            code, said = await flip(place.deployment, place.worker(flips).instance_id, to)
            assert (code, flips.role) == (0, to), said
            if number < 2:
                await place.all_is_told(flips)
            await place.ask(place.new_prompt())
            if to == role:
                seen.append(kept_open(flips))
        files, ports = zip(*seen, strict=True)
        # After two, four and six flips; a flip used to leave nine files, four or five of them ports. Those of the last
        # term's requests may still wait for the garbage collector.
        assert max(files) - files[0] <= 2 * FILES_OF_A_PUBLISHER, seen
        assert len(set(ports)) == 1, seen
        if is_first_stage:
            assert await place.hit_rate(flips, known) > 0.7

        was = place.worker(flips).instance_id
        os.kill(flips.pid, LEASE_ENDS)
        wait_until(
            lambda: flips.log.read_text().count("worker ready") == num_flips + 2, "it enters again", 60
        )
        assert place.worker(flips).instance_id != was
        await place.all_is_told(flips)
        if is_first_stage:
            assert await place.hit_rate(flips, known) > 0.7


def drain_and_resume(process: ManagedProcess) -> None:
    with httpx.Client(timeout=60, base_url=f"http://{LOOPBACK}:{process.spec.system_port}/engine") as worker:

        def is_in(state: str) -> bool:
            with contextlib.suppress(httpx.TransportError):  # between two role terms
                return bool(worker.post("/status", json={}).json()["state"] == state)
            return False

        for route, state in (("drain", "drained"), ("resume", "serving")):
            assert worker.post(f"/{route}", json={}).status_code == 200
            wait_until(partial(is_in, state), state, 60)


async def test_a_worker_on_tensorrt_llm_loads_nothing_of_engines_and_tools_in_all_its_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts, answers, flips, drains, answers again, and stops."""
    monkeypatch.setenv(LOADED, str(tmp_path / "loaded"))
    async with flipping(tmp_path, "decode_first", "decode", monkeypatch, "--admin-routes") as (place, flips):
        await place.ask(place.new_prompt())
        code, said = await flip(place.deployment, place.worker(flips).instance_id, "prefill")
        assert (code, flips.role) == (0, "prefill"), said
        await place.ask(place.new_prompt())
        drain_and_resume(flips)
        await place.ask(place.new_prompt())
    assert loaded_in(tmp_path / "loaded") == (3, [])
