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
def test_a_bad_flag_of_a_worker_is_named_with_its_value_and_what_is_allowed(
    args: str, key: str, value: str, allowed: str, model: str, refusal: Refusal
) -> None:
    said = refusal("worker", "--model", model, *args.split())

    assert re.search(rf"{key}: .*{value}.*expected .*{re.escape(allowed)}", said), said


def test_an_unknown_flag_of_a_worker_is_refused_with_the_closest_one(model: str, refusal: Refusal) -> None:
    said = refusal("worker", "--model", model, "--disagregation-mode", "prefill")

    assert "unknown flag --disagregation-mode; did you mean --disaggregation-mode?" in said


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
def test_a_bad_engine_config_is_refused_with_file_and_key(
    yaml: str, words: tuple[str, ...], tmp_path: Path, model: str, refusal: Refusal
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(yaml)

    said = refusal("worker", "--model", model, "--engine", "embedded", "--extra-engine-args", str(file))

    assert all(word in said for word in (str(file), *words)), said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('{"embedded": {"num_threads": 100000}}', "embedded.num_threads: 100000 is not allowed"),
        ('{"embedded": {"cpu_affinity": [9999]}}', "embedded.cpu_affinity: [9999] is not allowed"),
        (
            '{"kv_cache_config": {"max_tokens": 1000000000000}}',
            "kv_cache_config.max_tokens: 1000000000000 is not",
        ),
        (
            '{"dtype": "float33"}',
            "dtype: 'float33' is not allowed; expected auto or one of float32, bfloat16",
        ),
        ('{"max_seq_len": 100000}', "max_seq_len: 100000 is not allowed; expected at most the model's"),
    ],
)
def test_impossible_engine_setting_is_refused_with_its_reason(
    settings: str, words: str, model: str, refusal: Refusal
) -> None:
    said = refusal("worker", "--model", model, "--engine", "embedded", "--override-engine-args", settings)

    assert words in said


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

    expected = "a directory that exists, or the name of a model on the Hugging Face hub, ORGANISATION/NAME"
    assert said == f"error: --model: '/no/such/model' is not allowed; expected {expected}\n"
    assert not (tmp_path / "run").exists()
