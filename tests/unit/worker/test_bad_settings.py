"""A setting that cannot be served is named, with its value and what is allowed, before anything is built."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Checkpoints
from trtllm_disagg.cli import main
from trtllm_disagg.processes.interpreter import python

#: `refusal("worker", ...)`: the error that the command ends with.
Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    def refused(*args: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(args)
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("error: ") == 1
        return err

    return refused


@pytest.fixture
def model(checkpoints: Checkpoints) -> str:
    return str(checkpoints())


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--disaggregation-strategy sideways", "--disaggregation-strategy: .*sideways.*prefill_first"),
        ("--model /no/such/model", "--model: .*/no/such/model.*a directory that exists"),
        ("--kv-block-size 24", "--kv-block-size: 24.*a power of two"),
        ("--disagregation-mode prefill", r"--disagregation-mode; did you mean --disaggregation-mode\?"),
    ],
)
def test_a_bad_flag_of_a_worker_is_named_with_its_value_and_what_is_allowed(
    args: str, named: str, model: str, refusal: Refusal
) -> None:
    """All that can be wrong with one: tests/unit/config."""
    said = refusal("worker", "--model", model, *args.split())

    assert re.search(named, said), said


def test_a_bad_engine_config_is_refused_with_file_and_key(
    tmp_path: Path, model: str, refusal: Refusal
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("kv_cache_config: {tokens_per_blok: 16}")

    said = refusal("worker", "--model", model, "--engine", "embedded", "--extra-engine-args", str(file))

    words = (str(file), "kv_cache_config.tokens_per_blok", "16", "tokens_per_block?")
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ('{"embedded": {"num_threads": 100000}}', "embedded.num_threads: 100000 "),
        ('{"embedded": {"cpu_affinity": [9999]}}', "embedded.cpu_affinity: [9999] "),
        ('{"kv_cache_config": {"max_tokens": 1000000000000}}', "kv_cache_config.max_tokens: 1000000000000 "),
        ('{"dtype": "float33"}', "dtype: 'float33' "),
        ('{"max_seq_len": 100000}', "max_seq_len: 100000 "),
    ],
)
def test_impossible_engine_setting_is_refused_with_its_reason(
    settings: str, named: str, model: str, refusal: Refusal
) -> None:
    said = refusal("worker", "--model", model, "--engine", "embedded", "--override-engine-args", settings)

    assert named in said


def test_a_broken_checkpoint_is_refused_before_the_engine_starts(
    tmp_path: Path, model: str, refusal: Refusal
) -> None:
    """All that can be wrong with one: test_model_refusals.py."""
    broken = Path(shutil.copytree(model, tmp_path / "model"))
    with (broken / "model.safetensors").open("r+b") as weights:
        weights.truncate(10_000)

    said = refusal("worker", "--engine", "embedded", "--model", str(broken))

    assert "model.safetensors is no safetensors file, or not all of one" in said


#: What it takes to say what is wrong with a model.
CHECK = """
import sys
from trtllm_disagg.cli import main
try:
    main(["worker", "--engine", "embedded", "--model", sys.argv[1], "--override-engine-args", '{"dtype": "float33"}'])
finally:
    print(*(name for name in ("torch", "transformers", "dynamo", "uvloop") if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.process
def test_model_that_cannot_be_served_is_refused_before_torch_is_imported(model: str) -> None:
    ended = subprocess.run(
        python("-c", CHECK, model), capture_output=True, text=True, timeout=100, check=False
    )

    error, heavy = ended.stderr.splitlines()
    assert error.startswith("error: dtype: 'float33' is not allowed")
    assert heavy == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--strategy sideways --model any", ("--strategy", "sideways", "prefill_first", "decode_first")),
        ("--strategy agg", ("--model",)),
        ("--strategy agg --model any --prefill-workers 2", ("--prefill-workers", "2", "prefill_first")),
        ("--strategy agg --model any --engine-configs /none", ("--engine-configs", "/none", "agg.yaml")),
    ],
)
def test_a_bad_flag_of_up_is_refused_by_name(args: str, words: tuple[str, ...], refusal: Refusal) -> None:
    said = refusal("up", *args.split())

    assert all(word in said for word in words), said


def test_up_needs_a_model_before_it_starts_anything(tmp_path: Path, refusal: Refusal) -> None:
    said = refusal("up", "--strategy", "agg", "--model", "/no/such/model", "--run-dir", str(tmp_path / "run"))

    assert said.startswith("error: --model: '/no/such/model' ")
    assert not (tmp_path / "run").exists()
