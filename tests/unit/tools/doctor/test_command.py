"""`trtllm-disagg doctor`: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.models import write_checkpoint
from tests.unit.tools.doctor.test_rules import DECODE, PREFILL
from trtllm_disagg.cli import main
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.tools.doctor.rules import RULES

ENGINE_CONFIGS = Path(__file__).parents[4] / "engine_configs"
#: Of the embedded engine and of the modelled one.
NOT_FOR_TENSORRT_LLM = ("demo", "modelled")


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    for variable in ("PREFILL_CUDA_VISIBLE_DEVICES", "DECODE_CUDA_VISIBLE_DEVICES", "NIXL_PLUGIN_DIR"):
        monkeypatch.delenv(variable, raising=False)
    for name, content in (("prefill", PREFILL), ("decode", DECODE)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "prefill.yaml", tmp_path / "decode.yaml"


def status_of(*argv: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *map(str, argv)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("key", ["max_seq_len", "max_num_tokens"])
def test_number_as_text_is_refused_as_the_worker_refuses_it(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], key: str
) -> None:
    for path, content in zip(pair, (PREFILL, DECODE), strict=True):
        path.write_text(yaml.safe_dump(content | {key: str(content.get(key, 8192))}))
    assert status_of(*pair) == 1
    assert "error worker" in capsys.readouterr().out


def test_a_file_named_flags_gets_the_workers_own_checks(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[str] = []

    def engine_args(config: WorkerConfig) -> dict[str, Any]:
        given.append(config.extra_engine_args)
        return {}

    monkeypatch.setattr("trtllm_disagg.tools.doctor.diagnosis.build_engine_args", engine_args)
    monkeypatch.chdir(pair[0].parent)
    pair[0].rename("flags")
    assert status_of("flags", pair[1]) == 0
    assert given == ["flags", str(pair[1])]


@pytest.mark.parametrize("own", [None, 16384], ids=["decode has the model's", "both alike"])
def test_max_seq_len_above_the_models_is_a_note_with_its_length(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], own: int | None
) -> None:
    """No prompt is longer then, so that smaller limits of tokens are enough."""
    model = write_checkpoint(tmp_path / "model", max_position_embeddings=512)
    pair[0].write_text(yaml.safe_dump(PREFILL | {"max_num_tokens": 512}))
    pair[1].write_text(yaml.safe_dump(DECODE | {"max_seq_len": own}))
    assert status_of(*pair, "--model", model) == 0
    shown = capsys.readouterr().out
    roles = "prefill" if own is None else "prefill and decode"
    assert f"note max_seq_len: {roles}: max_seq_len: 512, the model's own" in shown


def test_json_has_every_row(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*pair, "--json", "--prefill-gpus", "0", "--decode-gpus", "0") == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["errors"], said["notes"], said["trtllm_version"]) == (1, 0, "1.3.0rc29")
    assert [row["rule"] for row in said["rows"]] == [rule.name for rule in RULES]
    (row,) = (row for row in said["rows"] if row["verdict"] == "error")
    assert row == {
        "rule": "GPUs",
        "verdict": "error",
        "prefill": "0",
        "decode": "0",
        "why": row["why"],
        "instead": "GPUs of their own: both have 0; or free_gpu_memory_fraction below 0.5 on both",
    }


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("kv_cache_config", 7, "a valid dictionary"),
        ("kv_cache_config", ["max_tokens"], "a valid dictionary"),
        ("cache_transceiver_config", "NIXL", "a valid dictionary"),
        ("speculative_config", "eagle", "keys with values"),
        ("speculative_config", [1], "keys with values"),
        ("model", 3, "a path or a name"),
        ("model", ["org/model"], "a path or a name"),
        ("revision", {"main": 1}, "a text"),
        ("max_seq_len", "long", "a valid integer"),
        ("dtype", ["float16"], "a valid string"),
    ],
)
def test_a_value_of_a_wrong_type_is_one_error_with_key_and_value(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], key: str, value: object, allowed: str
) -> None:
    pair[1].write_text(yaml.safe_dump(DECODE | {key: value}))
    assert status_of(*pair) == 1
    assert f"error keys: decode: {key}: {value!r}: expected {allowed}" in capsys.readouterr().out


def test_a_key_that_is_there_twice_ends_with_2(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pair[1].write_text(yaml.safe_dump(DECODE) + "max_batch_size: 3\nmax_batch_size: 4\n")
    assert status_of(*pair) == 2
    assert "decode.yaml is not YAML: max_batch_size is there twice, in lines" in capsys.readouterr().err


def test_auto_kv_dtype_is_resolved_from_the_model_directory(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16", "max_position_embeddings": 16384}')
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    pair[1].write_text(yaml.safe_dump(DECODE | {"kv_cache_config": {"dtype": "auto"}}))
    assert status_of(*pair) == 1
    capsys.readouterr()
    assert status_of(*pair, "--model", tmp_path) == 0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--trtllm-version", "new"], "--trtllm-version: 'new' is not allowed"),
        (
            ["--decode-gpus", "1,1"],
            "--decode-gpus: '1,1' is not allowed; expected different GPUs, as in 0,1,2,3",
        ),
        (["--strategy", "both"], "--strategy"),
    ],
)
def test_bad_usage_ends_with_2(
    pair: tuple[Path, Path], more: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*pair, *more) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "- a list\n", "a: b: c\n", b"\xff"])
def test_missing_or_invalid_yaml_file_exits_with_2(
    pair: tuple[Path, Path], content: str | bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is None:
        pair[0].unlink()
    else:
        pair[0].write_bytes(content if isinstance(content, bytes) else content.encode())
    assert status_of(*pair) == 2
    assert "prefill.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "folder",
    sorted(
        path.parent
        for path in ENGINE_CONFIGS.glob("*/prefill.yaml")
        if path.parent.name not in NOT_FOR_TENSORRT_LLM
    ),
)
def test_shipped_engine_pairs_have_no_error_and_no_note(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(folder / "prefill.yaml", folder / "decode.yaml", "--json") == 0
    assert json.loads(capsys.readouterr().out)["notes"] == 0


FLAGS = "--max-seq-len 8192 --trtllm.kv_cache_config.dtype fp8"


def test_flags_are_compared_as_engine_arguments(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pair[1].write_text(yaml.safe_dump({key: value for key, value in DECODE.items() if key != "max_seq_len"}))
    assert status_of(*pair, "--decode-flags", "--max-seq-len 8192") == 1
    assert "error max_seq_len: decode: max_seq_len: 16384\n" in capsys.readouterr().out
    assert status_of(*pair, "--decode-flags", "--max-seq-len 16384 --kv-block-size=32") == 0


def test_a_file_beats_a_flag_with_a_note_that_names_both(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*pair, "--decode-flags", "--max-seq-len 8192") == 0
    told = f"decode: max_seq_len: 16384 of {pair[1]} wins over --max-seq-len 8192"
    shown = "".join(capsys.readouterr().out.split())
    assert "note flags: ".replace(" ", "") + told.replace(" ", "") in shown
    assert "0 errors, 1 note".replace(" ", "") in shown


def test_an_override_beats_the_file(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*pair, "--decode-flags", "--trtllm.max_seq_len 8192") == 1
    assert "error max_seq_len: decode" in capsys.readouterr().out


def test_two_whole_command_lines_need_no_files(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shared = "python3 -m dynamo.trtllm --model-path Qwen/Qwen3-8B --disaggregation-strategy prefill_first"
    prefill = f"{shared} --disaggregation-mode prefill --extra-engine-args {pair[0]}"
    decode = f"{shared} --disaggregation-mode decode --extra-engine-args {pair[1]}"
    assert status_of("--prefill-flags", prefill, "--decode-flags", decode) == 0
    assert "TensorRT-LLM 1.3.0rc29, prefill_first" in capsys.readouterr().out
    assert status_of("--prefill-flags", FLAGS, "--decode-flags", "--max-seq-len 8192") == 1
    assert "error KV dtype" in capsys.readouterr().out


def test_model_and_template_of_flags_may_be_where_the_workers_start(pair: tuple[Path, Path]) -> None:
    there = "--model-path /in/container --custom-jinja-template /in/container/chat.jinja"
    assert status_of(*pair, "--prefill-flags", there, "--decode-flags", there) == 0
    assert status_of(*pair, "--model", "/in/container") == 1


def test_strategies_that_differ_are_an_error(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*pair, "--decode-flags", "--disaggregation-strategy prefill_first") == 1
    assert "error strategy: the same --disaggregation-strategy on both sides" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--max-seq-lem 5", "--prefill-flags: unknown flag --max-seq-lem; did you mean --max-seq-len?"),
        ("--max-seq-len many", "--prefill-flags: --max-seq-len: 'many' is not allowed"),
        ("--disaggregation-mode decode", "'decode' is not allowed; expected prefill"),
        ("--engine embedded", "expected tensorrt_llm: doctor knows its rules"),
        ("--extra-engine-args other.yaml", "give one of them"),
        ("--override-engine-args {", "--override-engine-args is not JSON"),
    ],
)
def test_flags_that_a_worker_refuses_end_with_2(
    pair: tuple[Path, Path], flags: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*pair, "--prefill-flags", flags) == 2
    assert told in capsys.readouterr().err
