"""Shared deployments of the demo model, and their state as seen from outside."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from trtllm_disagg.strategies import STRATEGIES, orders, spec_of
from trtllm_disagg.tools.up.lifecycle import Deployment, deployment_in_background
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import LOOPBACK, NO_WORKERS, DeploymentConfig
from trtllm_disagg.tools.up.up_command import engine_configs_in

ROOT = Path(__file__).parents[2]
DEMO_CONFIGS = ROOT / "engine_configs" / "demo"
DEMO_MODEL = ROOT / ".cache" / "demo-model"
VISION_MODEL = ROOT / ".cache" / "demo-vision-model"
MODEL_NAME = "demo"

#: Strategies in which workers call each other, and all with two roles.
RUN_BY_WORKERS = tuple(order.name for order in orders())
#: Strategies with one order for every request.
FIXED = tuple(spec.name for spec in STRATEGIES.values() if spec.builder is not None)
DISAGGREGATED = tuple(name for name in FIXED if spec_of(name).is_disaggregated)

SETTLE_SECONDS = 20.0
POLL_SECONDS = 0.02
#: Several times the 0.1 s after which workers read their engine's statistics, for a loaded machine.
UNCHANGED_SECONDS = 0.3
#: Loading is computation, perhaps on two cores.
LOADING_AT_ONCE = 2

#: A worker's remaining work and held resources; 0 when it is idle.
HELD = (
    "dynamo_component_inflight_requests",
    "trtllm_disagg_requests_active",
    "trtllm_disagg_queued_requests",
    "trtllm_disagg_queued_tokens",
    "trtllm_disagg_handoffs_held",
    "trtllm_disagg_kv_blocks_used",
)


def demo_model() -> Path:
    """The model of `make model`; if missing, one of pytest's processes makes it now."""
    return _made(DEMO_MODEL)


def vision_model() -> Path:
    """The model of `make vision-model`, likewise."""
    return _made(VISION_MODEL, "--vision")


def _made(model: Path, *flags: str) -> Path:
    made = model / "demo_model.json"
    if not made.is_file():
        model.parent.mkdir(exist_ok=True)
        with model.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.is_file():
                command = [sys.executable, "-m", "trtllm_disagg", "demo-model", *flags, str(model)]
                subprocess.run(command, check=True)
    return model


def demo_config(strategy: str, run_dir: Path, **changes: Any) -> DeploymentConfig:
    settings: dict[str, Any] = {
        "strategy": strategy,
        "model": str(demo_model()),
        "served_model_name": MODEL_NAME,
        "run_dir": run_dir,
        "http_port": 0,
        "engine": "embedded",
        "engine_configs": engine_configs_in(DEMO_CONFIGS, strategy),
    }
    return DeploymentConfig(**{**settings, **changes})


def wait_until(condition: Callable[[], object], what: str, seconds: float = SETTLE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not after {seconds:g} s: {what}"
        time.sleep(POLL_SECONDS)


class Worker:
    """One worker of a deployment, as shown by its /metrics page."""

    def __init__(self, process: ManagedProcess, http: httpx.Client) -> None:
        self.name = process.name
        self.role = process.role
        self.log = process.log
        self._url = f"http://{LOOPBACK}:{process.spec.system_port}/metrics"
        self._http = http

    @cached_property
    def instance_id(self) -> int:
        match = re.search(r'worker_id="([0-9a-f]+)"', self.page())
        assert match is not None, f"{self.name} shows no worker_id"
        return int(match[1], 16)

    def metric(self, name: str) -> float:
        """Sum over its endpoints `generate`; 0 if the page lacks it."""
        return _metric(self.page(), name)

    def num_requests(self) -> float:
        """Requests finished by its engine (Dynamo also counts notices between workers)."""
        return _metric(self.page(), "trtllm_request_success_total", "")

    def labels(self, name: str, label: str) -> set[str]:
        """The values of a metric's label."""
        lines = [line for line in self.page().splitlines() if line.startswith(name + "{")]
        return {match[1] for line in lines if (match := re.search(rf'\b{label}="([^"]*)"', line))}

    def held_and_counted(self) -> tuple[dict[str, float], list[str]]:
        """Its running, waiting and held items, and the lines of this project's counters."""
        page = self.page()
        held = {name: value for name in HELD if (value := _metric(page, name))}
        return held, [line for line in page.splitlines() if line.startswith("trtllm_disagg_")]

    def page(self) -> str:
        return self._http.get(self._url).raise_for_status().text


def _metric(page: str, name: str, label: str = 'dynamo_endpoint="generate"') -> float:
    return sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith(name + "{") and label in line
    )


class Served:
    """A running deployment with clients."""

    def __init__(self, deployment: Deployment, openai: OpenAI, http: httpx.Client) -> None:
        self.deployment = deployment
        self.strategy = deployment.config.strategy
        self.openai = openai
        self.http = http
        self.workers = [
            Worker(process, http) for process in deployment.processes if process.role not in NO_WORKERS
        ]

    @property
    def url(self) -> str:
        return self.deployment.base_url

    @property
    def first_stage(self) -> list[Worker]:
        """The workers that the frontend may call."""
        return [worker for worker in self.workers if worker.role in spec_of(self.strategy).kv_routed_roles]

    @property
    def second_stage(self) -> list[Worker]:
        return [worker for worker in self.workers if worker not in self.first_stage]

    def of_role(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == role]

    def total(self, name: str, workers: Iterable[Worker] | None = None) -> float:
        return sum(worker.metric(name) for worker in (self.workers if workers is None else workers))

    def wait_until_idle(self) -> None:
        """Wait until no worker runs or holds anything and each has counted its last step, which follows the answer.
        Fails after SETTLE_SECONDS.
        """
        held: Mapping[str, Any] = {}
        counted: Sequence[Sequence[str]] = ()
        unchanged_since = time.monotonic()

        def is_idle() -> bool:
            nonlocal held, counted, unchanged_since
            now = {worker.name: worker.held_and_counted() for worker in self.workers}
            held = {name: left for name, (left, _) in now.items() if left}
            before, counted = counted, [lines for _, lines in now.values()]
            if held or counted != before:
                unchanged_since = time.monotonic()
            return time.monotonic() - unchanged_since > UNCHANGED_SECONDS

        try:
            wait_until(is_idle, f"{self.strategy} is idle")
        except AssertionError as error:
            raise AssertionError(f"{error}; left: {held}") from None


@contextmanager
def served(config: DeploymentConfig) -> Iterator[Served]:
    with (
        deployment_in_background(config) as deployment,
        OpenAI(base_url=f"{deployment.base_url}/v1", api_key="none", max_retries=0, timeout=60.0) as openai,
        httpx.Client(timeout=60.0) as http,
    ):
        yield Served(deployment, openai, http)


class Fleet:
    """One deployment of the model that sees per strategy. The first use loads all in parallel. If one does not start,
    calls `tell` and starts it once more; if that fails too, so do all its tests.
    """

    def __init__(self, run_dirs: Path, wanted: Iterable[str], tell: Callable[[str, Exception], None]) -> None:
        self._run_dirs = run_dirs
        self._wanted = set(wanted)
        self._tell = tell
        self._slots = threading.Semaphore(LOADING_AT_ONCE)
        self._done = threading.Event()
        self._ready: dict[str, Future[Served]] = {}
        self._keepers: list[threading.Thread] = []

    def __getitem__(self, strategy: str) -> Served:
        if not self._ready:
            self._load()
        return self._ready[strategy].result()

    def close(self) -> None:
        """Stop all in parallel."""
        self._done.set()
        for keeper in self._keepers:
            keeper.join()

    def _load(self) -> None:
        vision_model()
        self._ready = {strategy: Future() for strategy in FIXED if strategy in self._wanted}
        for strategy in self._ready:
            self._keepers.append(threading.Thread(target=self._keep, args=(strategy,), name=strategy))
            self._keepers[-1].start()

    def _keep(self, strategy: str) -> None:
        ready = self._ready[strategy]
        with ExitStack() as stack:
            try:
                with self._slots:
                    ready.set_result(self._start(strategy, stack))
            except Exception as error:
                ready.set_exception(error)
            self._done.wait()

    def _start(self, strategy: str, stack: ExitStack) -> Served:
        model = str(vision_model())
        config = demo_config(strategy, self._run_dirs / strategy, model=model, images=True)
        try:
            return stack.enter_context(served(config))
        except Exception as error:
            self._tell(f"the shared {strategy}", error)
        return stack.enter_context(served(replace(config, run_dir=self._run_dirs / f"{strategy}-again")))
