"""Whatever is wrong is named, with its value and what is allowed; and a request never hurts a deployment."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.parity.answers import Api, Question, Refusal, ask
from tests.support.deployments import (
    DEMO_CONFIGS,
    DISAGGREGATED,
    FIXED,
    Fleet,
    Served,
    demo_config,
    demo_model,
    served,
)
from trtllm_disagg.deployment import DeploymentFailedError
from trtllm_disagg.deployment.run_dir import read_processes

# -- the command line and the YAML file


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtllm_disagg", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def worker(*args: str) -> subprocess.CompletedProcess[str]:
    return run("worker", "--model", str(demo_model()), *args)


@pytest.mark.parametrize(
    ("args", "key", "value", "allowed"),
    [
        ("--disaggregation-strategy sideways", "--disaggregation-strategy", "sideways", "prefill_first"),
        ("--disaggregation-mode sideways", "--disaggregation-mode", "sideways", "agg, prefill, decode"),
        ("--model /no/such/model", "--model", "/no/such/model", "a directory that exists"),
        (
            "--disaggregation-mode prefill --next-endpoint dyn://a.b.c",
            "--next-endpoint",
            "dyn://a.b.c",
            "no value: in mode prefill under decode_first",
        ),
        (
            "--disaggregation-mode decode --disaggregation-strategy prefill_first --next-endpoint dyn://a.b.c",
            "--next-endpoint",
            "dyn://a.b.c",
            "no value: in mode decode under prefill_first",
        ),
        ("--kv-block-size 24", "--kv-block-size", "24", "a power of two"),
        ("--max-batch-size many", "--max-batch-size", "many", "a whole number"),
        ("--extra-engine-args /no/such.yaml", "--extra-engine-args", "/no/such.yaml", "a YAML file"),
    ],
)
def test_a_bad_flag_of_a_worker(args: str, key: str, value: str, allowed: str) -> None:
    ended = worker(*args.split())

    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.search(rf"{key}: .*{value}.*expected .*{re.escape(allowed)}", ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_unknown_flag_of_a_worker() -> None:
    ended = worker("--disagregation-mode", "prefill")

    assert ended.returncode == 2
    assert "unknown flag --disagregation-mode; did you mean --disaggregation-mode?" in ended.stderr


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        (
            "kv_cache_config: {tokens_per_blok: 16}",
            ("kv_cache_config.tokens_per_blok", "16", "tokens_per_block?"),
        ),
        ("max_seq_len: lots", ("max_seq_len", "'lots'", "integer")),
        ("kv_cache_config: 3", ("kv_cache_config", "3", "KvCacheConfig")),
        ("- max_seq_len", ("keys with values", "list")),
        ("max_seq_len: [", ("not YAML",)),
    ],
)
def test_a_bad_engine_config(yaml: str, words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(yaml)

    ended = worker("--engine", "embedded", "--extra-engine-args", str(file))

    assert ended.returncode == 2, ended.stderr
    assert all(word in ended.stderr for word in (str(file), *words)), ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_value_that_only_the_engine_knows_to_be_wrong() -> None:
    ended = worker("--engine", "embedded", "--override-engine-args", '{"dtype": "float33"}')

    assert ended.returncode == 2, ended.stderr
    assert "dtype: 'float33' is not allowed; expected auto or one of float32, bfloat16" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('{"embedded": {"num_threads": 100000}}', "embedded.num_threads: 100000 is not allowed"),
        ('{"embedded": {"cpu_affinity": [9999]}}', "embedded.cpu_affinity: [9999] is not allowed"),
        (
            '{"kv_cache_config": {"max_tokens": 1000000000000}}',
            "kv_cache_config.max_tokens: 1000000000000 is not",
        ),
    ],
)
def test_a_setting_that_no_machine_can_honour(settings: str, words: str) -> None:
    ended = worker("--engine", "embedded", "--override-engine-args", settings)

    assert ended.returncode == 2, ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_broken_checkpoint(tmp_path: Path) -> None:
    """One line, before anything is loaded. All that can be wrong with one: test_model_refusals.py."""
    model = Path(shutil.copytree(demo_model(), tmp_path / "model"))
    with (model / "model.safetensors").open("r+b") as weights:
        weights.truncate(100_000)

    ended = run("worker", "--engine", "embedded", "--model", str(model))

    assert ended.returncode == 2, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "model.safetensors is no safetensors file, or not all of one" in said[0]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--strategy sideways --model any", ("--strategy", "sideways", "prefill_first", "decode_first")),
        ("--strategy agg", ("--model",)),
        ("--strategy agg --model any --prefill-workers 2", ("--prefill-workers", "2", "prefill_first")),
        ("--strategy agg --model any --engine-configs /none", ("--engine-configs", "/none", "agg.yaml")),
    ],
)
def test_a_bad_flag_of_up(args: str, words: tuple[str, ...]) -> None:
    ended = run("up", *args.split())

    assert (ended.returncode, ended.stdout) == (2, "")
    assert all(word in ended.stderr for word in words), ended.stderr


def test_up_passes_on_what_a_worker_says(tmp_path: Path) -> None:
    ended = run(
        *("up", "--strategy", "agg", "--model", str(demo_model()), "--http-port", "0"),
        *("--run-dir", str(tmp_path / "run"), "--worker-args=--max-batch-size=0"),
    )

    assert (ended.returncode, ended.stdout) == (1, "")
    assert "agg-0 died before the deployment was ready: --max-batch-size: 0 is not allowed" in ended.stderr
    assert "(exit code 2)" in ended.stderr


def test_up_needs_a_model_before_it_starts_anything(tmp_path: Path) -> None:
    ended = run(*("up", "--strategy", "agg", "--model", "/no/such/model", "--run-dir", str(tmp_path / "run")))

    assert (ended.returncode, ended.stdout) == (2, "")
    assert "error: --model: '/no/such/model' is not allowed; expected a directory that exists" in ended.stderr
    assert not (tmp_path / "run").exists()


# -- two stages that do not fit together


@pytest.fixture(scope="module")
def mismatches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """What is reported about prefill workers with blocks of 32 tokens and decode workers with blocks of 16."""

    def report(strategy: str) -> str:
        directory = tmp_path_factory.mktemp(strategy)
        prefill = directory / "prefill.yaml"
        text = (DEMO_CONFIGS / "prefill.yaml").read_text()
        prefill.write_text(text.replace("tokens_per_block: 16", "tokens_per_block: 32"))
        files = {"prefill": prefill, "decode": DEMO_CONFIGS / "decode.yaml"}
        config = demo_config(strategy, directory / "run", engine_configs=files)
        with pytest.raises(DeploymentFailedError) as failed, served(config):
            """It does not come up."""
        assert all(record.state == "exited" for record in read_processes(config.run_dir))
        return str(failed.value)

    with ThreadPoolExecutor(2) as side_by_side:
        yield dict(zip(DISAGGREGATED, side_by_side.map(report, DISAGGREGATED), strict=True))


@pytest.mark.parametrize("strategy", DISAGGREGATED)
def test_different_block_sizes_are_found_before_the_model_is_registered(
    strategy: str, mismatches: Mapping[str, str]
) -> None:
    report = mismatches[strategy]
    # The worker that comes second finds out.
    finder, _, sentence = report.splitlines()[0].partition("-0 ")
    sizes = "decode 16, prefill 32" if finder == "decode" else "prefill 32, decode 16"

    assert finder in ("prefill", "decode")
    said = f"kv_cache_config.tokens_per_block (--kv-block-size): {sizes}"
    cause = f"the two stages do not fit together; {said}"
    assert sentence.startswith(f"died before the deployment was ready: {cause}")
    assert "(exit code 2)" in sentence
    assert "worker ready" not in report


# -- requests

TOO_LONG = [300] * 2100

BAD_REQUESTS: dict[str, tuple[Api, Any, dict[str, Any], str]] = {
    "too_long": ("completions", TOO_LONG, {}, "the prompt has 2100 tokens; max_seq_len 2048"),
    "empty": ("completions", "", {}, "empty"),
    "no_such_token": ("completions", [999_999], {}, "Invalid request"),
    "negative_max_tokens": ("chat", "Hello?", {"max_tokens": -5}, "`-5`, expected u32"),
    "max_tokens_0": ("completions", "Hello?", {"max_tokens": 0}, "must be greater than 0, got 0"),
    "temperature": ("chat", "Hello?", {"temperature": 3}, "Temperature must be between 0 and 2, got 3"),
    "top_p": ("completions", "Hello?", {"top_p": 1.5}, "between 0 and 1, got 1.5"),
    "logprobs": ("completions", "Hello?", {"logprobs": 70}, "between 0 and 5, got 70"),
    "best_of": ("completions", "Hello?", {"best_of": 2}, "best_of=2"),
    "stop_token": ("completions", "Hello?", {"stop_token_ids": [999_999]}, "stop_token_ids holds 999999"),
    "repetition": ("chat", "Hello?", {"repetition_penalty": -1.0}, "-1"),
    "unknown_key": ("chat", "Hello?", {"bogus": 1}, "bogus"),
    "unknown_nvext": ("chat", "Hello?", {"nvext": {"bogus": 1}}, "bogus"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("bad", BAD_REQUESTS)
@pytest.mark.parametrize("strategy", FIXED)
def test_a_bad_request_is_refused_alike(
    strategy: str, bad: str, stream: bool, deployed: Served, fleet: Fleet
) -> None:
    api, prompt, options, words = BAD_REQUESTS[bad]
    if api == "chat":
        prompt = [{"role": "user", "content": prompt}]
    question = Question(api, prompt, options, stream)

    refusal = ask(deployed.openai, question)

    assert isinstance(refusal, Refusal)
    assert refusal.status == 400
    assert words in refusal.message
    assert refusal == ask(fleet["agg"].openai, question)


@pytest.mark.parametrize("strategy", FIXED)
def test_it_still_serves_afterwards(strategy: str, deployed: Served, fleet: Fleet) -> None:
    question = Question("completions", "Are you there?", {"max_tokens": 8}, salt="afterwards")

    assert ask(deployed.openai, question) == ask(fleet["agg"].openai, question)

    deployed.wait_until_idle()
