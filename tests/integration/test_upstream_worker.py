"""Upstream's own worker, `python -m dynamo.trtllm`, unmodified, on the embedded engine as `tensorrt_llm`.

Behind the real frontend it has to give the tokens that the engine gives when it is called directly.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import ROOT
from tests.support.dynamo_deployment import COMPLETIONS, JSON, Answer, DynamoDeployment
from tests.support.models import EOS, write_checkpoint
from trtllm_disagg.engines.embedded import LLM, SamplingParams

pytest.importorskip("dynamo.trtllm._version")
for module in ("PIL", "blake3"):
    pytest.importorskip(module, reason="upstream's worker imports it; TensorRT-LLM would bring it")

MODEL = "tiny"
#: One full block and a half.
PROMPTS = [[(7 * i + k) % 250 + 2 for i in range(45)] for k in range(3)]
SAMPLING = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.75, "top_p": 0.875, "seed": 11}}
#: Fills the context, so it runs for seconds.
LONG = {"max_tokens": 1900, "ignore_eos": True}

#: The keys of upstream's engine_configs/qwen3, and sizes for a test.
AGG_YAML = """
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
#: A prefill without a decode keeps its KV until the timeout.
DISAGG_YAML = AGG_YAML + "cache_transceiver_config: {backend: DEFAULT, kv_transfer_timeout_ms: 3000}\n"
ROLES = {"agg": (AGG_YAML, ["agg"]), "disagg": (DISAGG_YAML, ["prefill", "decode"])}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token is ASCII text, so that texts can be compared however they are cut."""
    directory = write_checkpoint(tmp_path_factory.mktemp("model"))
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] = {
        text if text.isascii() or text == "Ġ" else f"x{token}": token
        for text, token in tokenizer["model"]["vocab"].items()
    }
    path.write_text(json.dumps(tokenizer))
    return directory


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LLM]:
    with LLM(str(model), kv_cache_config={"max_tokens": 4096}) as llm:
        yield llm


@pytest.fixture(scope="module", params=ROLES)
def deployment(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DynamoDeployment]:
    directory = tmp_path_factory.mktemp(request.param)
    deployment = DynamoDeployment(directory)
    yaml, roles = ROLES[request.param]
    (directory / "engine.yaml").write_text(yaml)
    try:
        deployment.start_frontend()
        deployment.start_workers({role: worker_command(role, model, directory) for role in roles})
        deployment.wait_ready(completion(PROMPTS[0], max_tokens=1))
        yield deployment
    finally:
        deployment.stop()


def worker_command(role: str, model: Path, directory: Path) -> list[str]:
    return [
        *("tests.support.mount", "-m", "dynamo.trtllm"),
        *("--model", str(model), "--served-model-name", MODEL, "--gpus-per-node", "1"),
        *("--disaggregation-mode", role, "--extra-engine-args", str(directory / "engine.yaml")),
        *("--publish-kv-events", "--publish-metrics"),
    ]


def completion(prompt: list[int], **options: Any) -> dict[str, Any]:
    extra = {"extra_fields": ["completion_token_ids", "timing"]}
    return {"model": MODEL, "prompt": prompt, "temperature": 0.0, "nvext": extra, **options}


def direct(engine: LLM, prompt: list[int], max_tokens: int, sampling: dict[str, Any]) -> Answer:
    """The engine in this process, asked for the same."""
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[EOS], logprobs=1, **sampling)
    [output] = engine.generate(prompt, params).outputs
    logprobs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    return Answer(output.token_ids, output.text, output.finish_reason, logprobs)


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_upstream_worker_answers_have_the_embedded_engines_tokens(
    deployment: DynamoDeployment, engine: LLM, name: str, streaming: bool
) -> None:
    for prompt in PROMPTS:
        body = completion(prompt, max_tokens=40, logprobs=1, **SAMPLING[name])
        answer = Answer.of(list(deployment.stream(body))) if streaming else deployment.complete(body)

        expected = direct(engine, prompt, 40, SAMPLING[name])
        assert answer.tokens == expected.tokens
        assert answer.text == expected.text
        assert answer.finish_reason == expected.finish_reason
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_router_learns_of_blocks_cached_by_the_upstream_worker(deployment: DynamoDeployment) -> None:
    def is_known() -> bool:
        answer = deployment.post_ok(COMPLETIONS, completion(PROMPTS[2], max_tokens=2))
        cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return bool(answer["nvext"]["timing"]["kv_hit_rate"] == 0.5 and cached_tokens >= 32)

    deployment.wait_until(is_known, "one of two blocks is known to the router, and reused")


def test_upstream_worker_metrics_have_the_times_of_requests(deployment: DynamoDeployment) -> None:
    def count(worker: str, name: str) -> float:
        return deployment.gauge(worker, f"trtllm_{name}_count")

    *_, last = deployment.system_ports
    before = count(last, "time_to_first_token_seconds")
    deployment.complete(completion(PROMPTS[0], max_tokens=8))
    deployment.wait_until(
        lambda: count(last, "time_to_first_token_seconds") == before + 1, "the request was measured"
    )
    assert count(last, "time_per_output_token_seconds") > 0
    assert deployment.gauge(last, "trtllm_time_to_first_token_seconds_sum") > 0
    if last == "decode":
        assert count(last, "kv_transfer_latency_seconds") == deployment.gauge(
            last, "trtllm_kv_transfer_success_total"
        )
        assert count(last, "kv_transfer_latency_seconds") > 0
        assert deployment.gauge(last, "trtllm_kv_transfer_bytes_sum") > 0


def test_requests_that_are_dropped_at_once_leave_nothing(deployment: DynamoDeployment, engine: LLM) -> None:
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05):
        with deployment.connection() as connection:
            body = completion(PROMPTS[0], stream=True, **LONG)
            connection.request("POST", COMPLETIONS, json.dumps(body), JSON)
            time.sleep(delay)

    deployment.wait_until(lambda: is_idle(deployment), "their blocks are free")
    expected = direct(engine, PROMPTS[1], 10, SAMPLING["greedy"])
    assert deployment.complete(completion(PROMPTS[1], max_tokens=10)).tokens == expected.tokens


def is_idle(deployment: DynamoDeployment) -> bool:
    """Makes one small request, since gauges move with steps; no worker may hold more than that one's blocks."""
    deployment.complete(completion(PROMPTS[1], max_tokens=2))
    # A prefill worker's last step is over before the decode worker has fetched the two blocks.
    allowed = {"prefill": 2.0}
    return all(
        deployment.gauge(worker, "trtllm_kv_cache_used_blocks") <= allowed.get(worker, 0.0)
        for worker in deployment.system_ports
    )


def test_calls_of_a_request_are_counted_beside_those_of_upstreams_handlers() -> None:
    # In a process of its own: it mounts an engine as `tensorrt_llm`.
    command = [sys.executable, "-m", "benchmarks.overhead", "--calls", "--upstream", "--json"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=120, cwd=ROOT).stdout
    figures = {each["figure"]: each["value"] for each in json.loads(printed)}
    for order in (
        "agg",
        "prefill_first",
        "decode_first",
        "router",
        "dynamo.trtllm agg",
        "dynamo.trtllm router",
    ):
        assert figures[f"{order} all"] == figures[f"{order} Python"] + figures[f"{order} C"]
        assert min(figures[f"{order} C"], figures[f"{order} token"]) > 1
