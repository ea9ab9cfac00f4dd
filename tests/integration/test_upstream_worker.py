"""Upstream's own worker, `python -m dynamo.trtllm`, unmodified, on the embedded engine mounted as `tensorrt_llm`.

Behind the real frontend it has to give the tokens that the engine gives when it is called directly.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.models import EOS, write_checkpoint
from trtllm_disagg.deployment.plan import LOOPBACK
from trtllm_disagg.deployment.ports import free_http_port, free_system_ports
from trtllm_disagg.embedded import LLM, SamplingParams

pytest.importorskip("dynamo.trtllm._version")
pytest.importorskip("PIL", reason="upstream's worker needs it; TensorRT-LLM would bring it")
pytest.importorskip("blake3", reason="upstream's worker needs it; TensorRT-LLM would bring it")

START_TIMEOUT = 60.0
STOP_TIMEOUT = 3.0
MODEL = "tiny"
#: Not a multiple of the block size, and longer than one block.
PROMPTS = [[(7 * i + k) % 250 + 2 for i in range(45)] for k in range(3)]
SAMPLING = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.75, "top_p": 0.875, "seed": 11}}

ENGINE_YAML = """
tensor_parallel_size: 1
moe_expert_parallel_size: 1
enable_attention_dp: false
trust_remote_code: true
max_num_tokens: 8192
enable_chunked_prefill: true
disable_overlap_scheduler: true
cuda_graph_config: {max_batch_size: 16}
kv_cache_config: {free_gpu_memory_fraction: 0.85, max_tokens: 4096}
"""
DISAGG_YAML = ENGINE_YAML + "cache_transceiver_config: {backend: DEFAULT}\n"


@dataclass
class Deployment:
    """Frontend and workers, each a process with a log."""

    directory: Path
    http_port: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    system_ports: dict[str, int] = field(default_factory=dict)

    def start(self, name: str, *command: str, system_port: int | None = None) -> None:
        environment = os.environ | {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.directory / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "TMPDIR": str(self.directory),
        }
        if system_port is not None:
            self.system_ports[name] = system_port
            environment["DYN_SYSTEM_PORT"] = str(system_port)
        with self.log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def logs(self) -> str:
        return "\n".join(
            f"--- {name} (exit code {process.poll()})\n{self.log(name).read_text(errors='replace')[-6000:]}"
            for name, process in self.processes.items()
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            if dead:
                pytest.fail(f"{', '.join(dead)} died while starting\n{self.logs()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("POST", "/v1/completions", completion(PROMPTS[0], max_tokens=1))[0] == 200:
                    return
            time.sleep(0.1)
        pytest.fail(f"not ready after {START_TIMEOUT} s\n{self.logs()}")

    def stop(self) -> None:
        """An idle prefill worker would drain for 30 s, so the patience is short."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def request(self, method: str, path: str, body: Any = None, port: int = 0) -> tuple[int, bytes]:
        with self.open(method, path, body, port) as response:
            return response.status, response.read()

    @contextlib.contextmanager
    def open(
        self, method: str, path: str, body: Any = None, port: int = 0
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(LOOPBACK, port or self.http_port, timeout=30)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def complete(self, body: dict[str, Any]) -> Answer:
        status, content = self.request("POST", "/v1/completions", body)
        assert status == 200, f"{status} {content!r}\n{self.logs()}"
        return Answer.of([json.loads(content)])

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self.open("POST", "/v1/completions", body | {"stream": True}) as response:
            assert response.status == 200, self.logs()
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def gauge(self, worker: str, name: str) -> float:
        """Sum over all labels; 0 when there is none yet."""
        _, content = self.request("GET", "/metrics", port=self.system_ports[worker])
        lines = content.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@dataclass
class Answer:
    tokens: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[float]

    @classmethod
    def of(cls, chunks: list[dict[str, Any]]) -> Answer:
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        nvext = [chunk.get("nvext") or {} for chunk in chunks]
        return cls(
            tokens=[token for extra in nvext for token in extra.get("completion_token_ids") or ()],
            text="".join(choice["text"] for choice in choices),
            finish_reason=next((c["finish_reason"] for c in choices if c.get("finish_reason")), None),
            logprobs=[lp for c in choices for lp in (c.get("logprobs") or {}).get("token_logprobs", ())],
        )


def completion(prompt: list[int], **options: Any) -> dict[str, Any]:
    wanted = {"extra_fields": ["completion_token_ids"]}
    return {"model": MODEL, "prompt": prompt, "temperature": 0.0, "nvext": wanted, **options}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token is ASCII text, so that texts can be compared however they are cut."""
    directory = write_checkpoint(tmp_path_factory.mktemp("model"))
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        text if text.isascii() or text == "Ġ" else f"x{token}": token for text, token in vocabulary.items()
    }
    path.write_text(json.dumps(tokenizer))
    return directory


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LLM]:
    with LLM(str(model), kv_cache_config={"max_tokens": 4096}) as llm:
        yield llm


@pytest.fixture(scope="module", params=["agg", "disagg"])
def deployment(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp(request.param)
    deployment = Deployment(directory, free_http_port(LOOPBACK, 0))
    roles = ["agg"] if request.param == "agg" else ["prefill", "decode"]
    (directory / "engine.yaml").write_text(ENGINE_YAML if request.param == "agg" else DISAGG_YAML)
    try:
        deployment.start(
            "frontend", "dynamo.frontend", "--router-mode", "kv", "--http-port", str(deployment.http_port)
        )
        for role, port in zip(roles, free_system_ports(len(roles)), strict=True):
            deployment.start(role, *worker_command(role, model, directory), system_port=port)
        deployment.wait_ready()
        yield deployment
    finally:
        deployment.stop()


def worker_command(role: str, model: Path, directory: Path) -> list[str]:
    return [
        *("trtllm_disagg.embedded.mount", "-m", "dynamo.trtllm"),
        *("--model", str(model), "--served-model-name", MODEL, "--gpus-per-node", "1"),
        *("--disaggregation-mode", role, "--extra-engine-args", str(directory / "engine.yaml")),
        *("--publish-kv-events", "--publish-metrics"),
    ]


def direct(engine: LLM, prompt: list[int], max_tokens: int, sampling: dict[str, Any]) -> Answer:
    """The engine in this process, asked for the same."""
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[EOS], logprobs=1, **sampling)
    [output] = engine.generate(prompt, params).outputs
    return Answer(
        output.token_ids,
        output.text,
        output.finish_reason,
        [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)],
    )


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_the_tokens_are_the_engines_own(
    deployment: Deployment, engine: LLM, name: str, streaming: bool
) -> None:
    for prompt in PROMPTS:
        body = completion(prompt, max_tokens=40, logprobs=1, **SAMPLING[name])
        answer = Answer.of(list(deployment.stream(body))) if streaming else deployment.complete(body)

        expected = direct(engine, prompt, 40, SAMPLING[name])
        assert answer.tokens == expected.tokens
        assert answer.text == expected.text
        assert answer.finish_reason == expected.finish_reason
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_cancelled_request_gives_its_blocks_back(deployment: Deployment) -> None:
    worker = "agg" if "agg" in deployment.processes else "decode"
    cancelled = "trtllm_request_success_total{"
    chunks = deployment.stream(completion(PROMPTS[0], max_tokens=1900, ignore_eos=True))
    for _ in range(5):
        next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    time.sleep(1)
    deployment.complete(completion(PROMPTS[1], max_tokens=4))
    time.sleep(1)
    for name in deployment.system_ports:
        print(name, deployment.gauge(name, "trtllm_kv_cache_used_blocks"))
        print(
            deployment.request("GET", "/metrics", port=deployment.system_ports[name])[1]
            .decode()
            .count(cancelled)
        )
    print(deployment.logs())
