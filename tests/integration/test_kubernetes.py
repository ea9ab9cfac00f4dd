"""The containers of a manifest in deploy/k8s/ as processes, which find each other by Kubernetes' API and answer."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.deployments import DEMO_CONFIGS, ROOT, demo_model, wait_until
from tests.support.kubernetes import WORKERS, Cluster, Kubelet, Manifest, Pod, components, container, rendered
from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.tools.up.ports import free_http_port, free_system_ports

START_SECONDS = 120.0
STEP_SECONDS = 0.01
#: The name for clients in the manifest.
MODEL = "Qwen/Qwen3-8B"
NAMESPACE = "serving-demo"
#: What Dynamo's operator gives every container, and workers, of the graph `demo` in the namespace `serving`.
OF_OPERATOR = {
    "DYN_NAMESPACE": NAMESPACE,
    "DYN_DISCOVERY_BACKEND": "kubernetes",
    "DYN_PARENT_DGD_K8S_NAME": "demo",
    "DYN_PARENT_DGD_K8S_NAMESPACE": "serving",
    "POD_NAMESPACE": "serving",
    # Of Dynamo's 5 s: one frontend learns at once that a worker leaves.
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
    # Of this machine of one: nothing listens elsewhere.
    "DYN_LOG": "info,tower_http=off",
    "DYN_SYSTEM_HOST": LOOPBACK,
    "DYN_TCP_RPC_HOST": LOOPBACK,
    "DYN_TCP_RESPONSE_STREAM_HOST": LOOPBACK,
    "DYN_EVENT_PLANE_HOST": LOOPBACK,
}
OF_WORKERS = {
    "DYN_SYSTEM_ENABLED": "true",
    "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
    "DYN_NAMESPACE_WORKER_SUFFIX": "1a2b3c4d",
    "DYN_FORWARDPASS_METRIC_PORT": "20380",
}
WORKERS_NAMESPACE = f"{NAMESPACE}-{OF_WORKERS['DYN_NAMESPACE_WORKER_SUFFIX']}"
OF_FRONTENDS = {
    "DYN_HTTP_HOST": LOOPBACK,
    "DYN_NAMESPACE_PREFIX": NAMESPACE,
    "DYN_NAMESPACE_PREFIX_STRICT": "true",
}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def on_an_engine_of_ours(component: Manifest, engine: str) -> None:
    """The demo model instead of the one of the manifest; everything else stays."""
    spec, model = container(component), str(demo_model().absolute())
    spec["args"][1] = f"--extra-engine-args={DEMO_CONFIGS / component['name']}.yaml"
    if engine == "recording":
        spec["args"][1] = (
            f"--override-engine-args={json.dumps({'recording': {'step_seconds': STEP_SECONDS}})}"
        )
    given = {"TRTLLM_DISAGG_MODEL": model, "TRTLLM_DISAGG_ENGINE": engine}
    for each in spec["env"]:
        each["value"] = given.get(each["name"], each["value"])


@dataclass(frozen=True)
class Graph:
    """The deployment of a manifest, with a model for its workers."""

    kubelet: Kubelet
    cluster: Cluster
    components: dict[str, Manifest]
    client: httpx.Client

    def start_workers(self, suffix: str = OF_WORKERS["DYN_NAMESPACE_WORKER_SUFFIX"]) -> list[Pod]:
        """Of one generation: the operator gives each a namespace of its own."""
        env = OF_OPERATOR | OF_WORKERS | {"DYN_NAMESPACE_WORKER_SUFFIX": suffix}
        ports = zip(("prefill", "decode"), free_system_ports(2), strict=True)
        pods = [self.kubelet.start(self.components[role], port, env) for role, port in ports]
        become_ready(pods, self.cluster)
        return pods

    def ask(self, prompt: str, count: int = 8) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == count


@pytest.fixture
def graph(cluster: Cluster, tmp_path: Path, engine: str) -> Iterator[Graph]:
    of_manifest = components(rendered(ROOT / "deploy" / "k8s" / "decode_first"))
    kubelet = Kubelet(cluster, {"trtllm-disagg-admin-key": {"key": secrets.token_bytes(32)}}, tmp_path)
    http_port = free_http_port(LOOPBACK, 0)
    try:
        kubelet.start(of_manifest["frontend"], http_port, OF_OPERATOR | OF_FRONTENDS)
        for role in ("prefill", "decode"):
            on_an_engine_of_ours(of_manifest[role], engine)
        with httpx.Client(base_url=f"http://{LOOPBACK}:{http_port}", timeout=60.0) as client:
            yield Graph(kubelet, cluster, of_manifest, client)
    finally:
        kubelet.close()


def has_model(graph: Graph) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return bool(graph.client.get("/v1/models").json()["data"])
    return False


def stop(graph: Graph, pod: Pod) -> None:
    pod.process.terminate()
    component = graph.components[pod.name.rpartition("-")[0]]
    grace_seconds = component["podTemplate"]["spec"]["terminationGracePeriodSeconds"]
    assert pod.process.wait(grace_seconds) == 0, pod.log.read_text()[-2000:]


@pytest.mark.parametrize("engine", ["embedded"])
def test_pods_of_a_manifest_find_each_other_answer_and_are_switched(graph: Graph, tmp_path: Path) -> None:
    _, decode = graph.start_workers()
    wait_until(lambda: has_model(graph), "a model", START_SECONDS)
    prompts = (f"About a list of {n}:" for n in itertools.count())

    def crosses_both_stages() -> bool:
        """Decode may learn of prefill a moment after the frontend has learned of decode."""
        graph.ask(next(prompts))
        return pulls(decode) > 0

    wait_until(crosses_both_stages, "KV has moved")
    steps = tmp_path / "steps.jsonl"
    with graph.kubelet.also_running(decode, *reader_of_steps("prefill", steps)):
        wait_until(lambda: crosses_both_stages() and has_prefilled(steps), "the Planner sees prefill")
    switch = decode.exec("-m", "trtllm_disagg", "switch", "--to", "prefill_first")
    assert switch.returncode == 0, switch.stderr
    before = pulls(decode)
    assert crosses_both_stages()
    # The engine tells the worker's page of it a moment after the answer.
    wait_until(lambda: pulls(decode) > before, "KV has moved in the other order")
    assert graph.cluster.names(WORKERS) >= {"prefill-0", "decode-0"}
    stop(graph, decode)
    assert '"part":"decode/decode_first"' in decode.log.read_text()
    assert '"part":"decode/prefill_first"' in decode.log.read_text()


@pytest.mark.parametrize("engine", ["recording"])
def test_the_workers_of_an_update_replace_those_before_without_a_failed_request(graph: Graph) -> None:
    old = graph.start_workers()
    wait_until(lambda: has_model(graph), "a model", START_SECONDS)
    is_over = threading.Event()

    def ask_always(client: int) -> int:
        for number in itertools.count():
            graph.ask(f"{client}: about a list of {number}:", 64)
            if is_over.is_set():
                return number
        raise AssertionError

    with ThreadPoolExecutor(3) as clients:
        asking = [clients.submit(ask_always, client) for client in range(3)]
        try:
            new = graph.start_workers("5e6f7a8b")
            wait_until(lambda: all(answered(pod) for pod in new), "the new workers answer, too")
            for pod in old:
                stop(graph, pod)
            before = answered(new[-1])
            wait_until(lambda: answered(new[-1]) > before + 3, "the new workers answer alone")
        finally:
            is_over.set()
        assert all(each.result() > 3 for each in asking)


def reader_of_steps(component: str, out: Path) -> Sequence[str]:
    """The command of Dynamo's own reader of the metrics that its Planner decides by."""
    return (
        *("-m", "dynamo.common.recv_forward_pass_metrics", "--namespace", WORKERS_NAMESPACE),
        *("--component", component, "--request-plane", "tcp"),
        *("--output", str(out), "--flush-interval", "0.1"),
    )


def has_prefilled(steps: Path) -> bool:
    lines = steps.read_text().splitlines() if steps.exists() else []
    read = [json.loads(line)["metrics"] for line in lines if line.endswith("}")]
    return any(
        step["scheduled_requests"]["sum_prefill_tokens"] > 0 and step["wall_time"] > 0 for step in read
    )


def pulls(pod: Pod) -> float:
    return metric(pod, "trtllm_disagg_kv_pulls_total")


def answered(pod: Pod) -> float:
    return metric(pod, "dynamo_component_requests_total", 'dynamo_endpoint="generate"')


def metric(pod: Pod, name: str, label: str = "") -> float:
    page = httpx.get(f"http://{LOOPBACK}:{pod.port}/metrics").text
    return sum(map(float, re.findall(rf"^{name}\{{.*{label}.*\}} (\S+)$", page, re.MULTILINE)))


def become_ready(pods: Sequence[Pod], cluster: Cluster) -> None:
    """As a kubelet sees it, and then the endpoint controller: a pod that loads is neither started nor ready."""
    seen: dict[str, list[int]] = {pod.name: [] for pod in pods}

    def is_started(pod: Pod) -> bool:
        assert pod.process.poll() is None, pod.log.read_text()[-4000:]
        with contextlib.suppress(httpx.TransportError):
            seen[pod.name].append(httpx.get(pod.url_of("startupProbe")).status_code)
        return seen[pod.name][-1:] == [200]

    def are_started() -> bool:
        started = [is_started(pod) for pod in pods]
        return all(started)

    wait_until(are_started, "the workers have started", START_SECONDS)
    assert {statuses[0] for statuses in seen.values()} == {503}
    for pod in pods:
        assert httpx.get(pod.url_of("readinessProbe")).status_code == 200
        cluster.now_ready(pod.name)
