"""Every script in launch/ brings up what it says, answers, and is gone without a trace when told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.deployments import MODEL_NAME, ROOT, demo_model, wait_until
from trtllm_disagg.tools.up.orphan_reaper import MARK_VARIABLE, kill_marked, marked_processes
from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.tools.up.ports import free_http_port, free_system_ports

START_SECONDS = 120.0
STOP_SECONDS = 30.0


class Launch:
    """The scripts of one deployment; all that they start carries `mark`."""

    def __init__(self, directory: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.http_port = free_http_port(LOOPBACK, 0)
        self._directory = directory
        self._ports = iter(free_system_ports(2))
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, script: str, *args: str, **variables: str) -> None:
        environment = {
            "PYTHON": sys.executable,
            "MODEL": str(demo_model()),
            "SERVED_MODEL_NAME": MODEL_NAME,
            # The scripts are what is tested: an engine that loads nothing answers as well.
            "ENGINE": "recording",
            "ENGINE_CONFIGS": str(self._engine_configs()),
            "HTTP_PORT": str(self.http_port),
            "DYN_FILE_KV": str(self._directory / "discovery"),
            # Nothing is asked while they end.
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.2",
            MARK_VARIABLE: self.mark,
        }
        with self._log(script).open("wb") as log:
            self._running[script] = subprocess.Popen(
                [str(ROOT / "launch" / script), *args],
                env={**os.environ, **environment, **variables},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def next_port(self) -> str:
        return str(next(self._ports))

    def wait_until_listed(self) -> None:
        def is_listed() -> bool:
            self._require_all_run()
            try:
                answer = httpx.get(f"http://{LOOPBACK}:{self.http_port}/v1/models")
            except httpx.TransportError:
                return False
            return MODEL_NAME in answer.text

        wait_until(is_listed, "the model is listed", START_SECONDS)

    def wait_until_said(self, script: str, words: str) -> None:
        def is_said() -> bool:
            self._require_all_run()
            return words in self.said(script)

        wait_until(is_said, words, START_SECONDS)

    def stop(self, script: str, number: signal.Signals = signal.SIGTERM) -> int:
        self._running[script].send_signal(number)
        return self.wait(script)

    def wait(self, script: str) -> int:
        status = self._running[script].wait(STOP_SECONDS)
        del self._running[script]
        return status

    def said(self, script: str) -> str:
        return self._log(script).read_text(errors="replace")

    def require_nothing_left(self) -> None:
        """A worker's watchdog ends a moment after its worker."""
        wait_until(lambda: not marked_processes(self.mark), "everything has ended", STOP_SECONDS)

    def close(self) -> None:
        kill_marked(self.mark)
        for process in self._running.values():
            process.wait()

    def _require_all_run(self) -> None:
        for script, process in self._running.items():
            assert process.poll() is None, f"{script} ended:\n{self.said(script)}"

    def _engine_configs(self) -> Path:
        directory = self._directory / "engine_configs"
        directory.mkdir(exist_ok=True)
        for role in ("agg", "prefill", "decode"):
            (directory / f"{role}.yaml").write_text("recording: {}\n")
        return directory

    def _log(self, script: str) -> Path:
        return self._directory / f"{script}.log"

    def answer(self) -> None:
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Ready?"}], "max_tokens": 8}
        answer = httpx.post(f"http://{LOOPBACK}:{self.http_port}/v1/chat/completions", json=body, timeout=30)
        assert answer.json()["choices"][0]["message"]["content"], answer.text


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.close()


def test_every_script_is_launched_here() -> None:
    scripts = {path.name for path in (ROOT / "launch").glob("*.sh")}
    scripts -= {"lib.sh", "mpi.sh"}  # tests/unit/test_launch_ranks.py
    assert scripts == {"agg.sh", "agg_worker.sh", "decode.sh", "disagg.sh", "frontend.sh", "prefill.sh"}


@pytest.mark.parametrize("workers", [("agg_worker.sh",), ("prefill.sh", "decode.sh")])
def test_scripts_of_the_roles_serve_together_and_end_cleanly(
    launch: Launch, workers: tuple[str, ...]
) -> None:
    launch.start("frontend.sh")
    for script in workers:
        launch.start(script, DYN_SYSTEM_PORT=launch.next_port(), STRATEGY="prefill_first")
    launch.wait_until_listed()
    launch.answer()
    for script in (*workers, "frontend.sh"):
        assert launch.stop(script) == 0
    launch.require_nothing_left()


@pytest.mark.parametrize("strategy", ["decode_first", "agg"])
def test_deployment_scripts_print_the_ready_line_and_serve(launch: Launch, strategy: str) -> None:
    script, args = ("agg.sh", ()) if strategy == "agg" else ("disagg.sh", (strategy,))
    launch.start(script, *args)
    ready = f"ready http://{LOOPBACK}:{launch.http_port} model={MODEL_NAME} strategy={strategy}"
    launch.wait_until_said(script, ready)

    launch.answer()

    assert launch.stop(script, signal.SIGINT if strategy == "decode_first" else signal.SIGTERM) == 0
    launch.require_nothing_left()
