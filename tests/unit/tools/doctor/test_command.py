"""`trtllm-disagg doctor`: what it prints, and how it ends."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.models import write_checkpoint
from tests.unit.tools.doctor.conftest import Doctor, Files, status_of
from tests.unit.tools.doctor.test_rules import DECODE, PREFILL
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.tools.doctor.rules import RULES

ENGINE_CONFIGS = Path(__file__).parents[4] / "engine_configs"
#: Of the embedded engine and of the modelled one.
NOT_FOR_TENSORRT_LLM = ("demo", "modelled")


def test_a_file_named_flags_gets_the_workers_own_checks(
    pair: Files, monkeypatch: pytest.MonkeyPatch, doctor: Doctor
) -> None:
    given: list[str] = []

    def engine_args(config: WorkerConfig) -> dict[str, Any]:
        given.append(config.extra_engine_args)
        return {}

    monkeypatch.setattr("trtllm_disagg.tools.doctor.diagnosis.build_engine_args", engine_args)
    monkeypatch.chdir(pair[0].parent)
    pair[0].rename("flags")
    assert doctor("flags", pair[1]).status == 0
    assert given == ["flags", str(pair[1])]


@pytest.mark.parametrize("own", [None, 16384], ids=["decode has the model's", "both alike"])
def test_max_seq_len_above_the_models_is_a_note_with_its_length(
    pair: Files, tmp_path: Path, doctor: Doctor, own: int | None
) -> None:
    """No prompt is longer then, so that smaller limits of tokens are enough."""
    model = write_checkpoint(tmp_path / "model", max_position_embeddings=512)
    pair[0].write_text(yaml.safe_dump(PREFILL | {"max_num_tokens": 512}))
    pair[1].write_text(yaml.safe_dump(DECODE | {"max_seq_len": own}))
    ended = doctor(*pair, "--model", model)
    assert ended.status == 0
    roles = "prefill" if own is None else "prefill and decode"
    assert f"note max_seq_len: {roles}: max_seq_len: 512, the model's own" in ended.out


def test_json_has_every_row(pair: Files, doctor: Doctor) -> None:
    ended = doctor(*pair, "--json", "--prefill-gpus", "0", "--decode-gpus", "0")
    assert ended.status == 1
    said = json.loads(ended.out)
    assert (said["errors"], said["notes"], said["trtllm_version"]) == (1, 0, "1.3.0rc29")
    assert [row["rule"] for row in said["rows"]] == [rule.name for rule in RULES]
    (row,) = (row for row in said["rows"] if row["verdict"] == "error")
    assert (row["rule"], row["prefill"], row["decode"]) == ("GPUs", "0", "0")
    assert row["why"]
    assert "both have 0" in row["instead"]


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
    pair: Files, doctor: Doctor, key: str, value: object, allowed: str
) -> None:
    pair[1].write_text(yaml.safe_dump(DECODE | {key: value}))
    ended = doctor(*pair)
    assert ended.status == 1
    assert f"error keys: decode: {key}: {value!r}: expected {allowed}" in ended.out


def test_auto_kv_dtype_is_resolved_from_the_model_directory(
    pair: Files, tmp_path: Path, doctor: Doctor
) -> None:
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16", "max_position_embeddings": 16384}')
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    pair[1].write_text(yaml.safe_dump(DECODE | {"kv_cache_config": {"dtype": "auto"}}))
    assert doctor(*pair).status == 1
    assert doctor(*pair, "--model", tmp_path).status == 0


DUPLICATE = yaml.safe_dump(DECODE) + "max_batch_size: 3\nmax_batch_size: 4\n"


@pytest.mark.parametrize("content", [None, b"- a list\n", b"a: b: c\n", b"\xff", DUPLICATE.encode()])
def test_missing_or_invalid_yaml_file_exits_with_2(
    pair: Files, doctor: Doctor, content: bytes | None
) -> None:
    if content is None:
        pair[0].unlink()
    else:
        pair[0].write_bytes(content)
    ended = doctor(*pair)
    assert ended.status == 2
    assert "prefill.yaml" in ended.err
    assert content != DUPLICATE.encode() or "max_batch_size is there twice" in ended.err


@pytest.mark.parametrize(
    "folder",
    sorted(
        path.parent
        for path in ENGINE_CONFIGS.glob("*/prefill.yaml")
        if path.parent.name not in NOT_FOR_TENSORRT_LLM
    ),
)
def test_shipped_engine_pairs_have_no_error_and_no_note_but_reuse_off(folder: Path, doctor: Doctor) -> None:
    ended = doctor(folder / "prefill.yaml", folder / "decode.yaml", "--json")
    assert ended.status == 0
    assert json.loads(ended.out)["notes"] == (folder.name in ("gpt-oss-120b", "qwen2.5-vl"))
    for stages in (("flex", "flex"), ("flex", "decode"), ("prefill", "flex")):
        ended = doctor(*(folder / f"{name}.yaml" for name in stages), "--json")
        rows = {row["rule"] for row in json.loads(ended.out)["rows"] if row["verdict"] != "ok"}
        # What prefill with overlap and decode without reuse have for certain.
        assert (ended.status, rows - {"overlap scheduler", "KV events"}) == (0, set())


@pytest.mark.parametrize(
    ("template", "variables", "lacking"),
    [
        ("{{ tools }}<think>", "", "--dyn-reasoning-parser, --dyn-tool-call-parser"),
        ("{{ tools }}<think>", "DYN_TOOL_CALL_PARSER=hermes\n", "--dyn-reasoning-parser"),
        ("{{ tools }}", "DYN_TOOL_CALL_PARSER=hermes\n", None),
        ("{{ messages }}", "", None),
    ],
)
def test_a_parser_that_the_chat_template_wants_is_missed(
    pair: Files, tmp_path: Path, doctor: Doctor, template: str, variables: str, lacking: str | None
) -> None:
    (tmp_path / "worker.env").write_text(f"# Its parsers.\n{variables}")
    (tmp_path / "chat_template.jinja").write_text(template)
    (row,) = (
        row
        for row in json.loads(doctor(*pair, "--model", tmp_path, "--json").out)["rows"]
        if row["rule"] == "parsers"
    )
    expected = (
        ("ok", "") if lacking is None else ("note", f"both: {lacking}, or in worker.env beside the files")
    )
    assert (row["verdict"], row["instead"]) == expected


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ("", 0, "0 errors, 0 notes; TensorRT-LLM 1.3.0rc29, decode_first\n"),
        ("--max-seq-len 8192", 0, "0 errors, 1 note"),
        ("--trtllm.max_seq_len 8192", 1, "error max_seq_len: decode"),
        ("--disaggregation-strategy prefill_first", 1, "error strategy"),
        ("--engine-stall-timeout 9", 0, "note engine-stall-timeout: decode: shorter than the longest step"),
        ("--engine-stall-timeout 900", 0, "900 s"),
    ],
    ids=[
        "equal",
        "a file beats a flag",
        "an override beats a file",
        "strategies differ",
        "impatient",
        "patient",
    ],
)
def test_flags_of_decode_are_compared_with_its_file(
    pair: Files, doctor: Doctor, more: str, status: int, said: str
) -> None:
    ended = doctor(*pair, *(["--decode-flags", more] if more else []))
    assert ended.status == status
    assert said in ended.out
    if "1 note" in said:
        told = f"note flags: decode: max_seq_len: 16384 of {pair[1]} wins over --max-seq-len 8192"
        assert "".join(told.split()) in "".join(ended.out.split())


@pytest.mark.parametrize(
    ("of_prefill", "of_decode", "said"),
    [
        ("", "--enable-multimodal --trtllm.kv_cache_config.enable_block_reuse false", ""),
        ("--enable-multimodal", "", "decode: --enable-multimodal, which checks"),
        ("--enable-multimodal", "--enable-multimodal", "decode: kv_cache_config.enable_block_reuse: True"),
    ],
)
def test_pair_that_could_mix_up_images_is_an_error(
    pair: Files, doctor: Doctor, of_prefill: str, of_decode: str, said: str
) -> None:
    given = {"--prefill-flags": of_prefill, "--decode-flags": of_decode}
    rows = json.loads(doctor(*pair, *itertools.chain(*filter(all, given.items())), "--json").out)["rows"]
    (row,) = (row for row in rows if row["rule"] == "images")
    assert (row["verdict"], said in row["instead"]) == ("error" if said else "ok", True)


def test_flags_are_compared_as_engine_arguments(pair: Files, doctor: Doctor) -> None:
    pair[1].write_text(yaml.safe_dump({key: value for key, value in DECODE.items() if key != "max_seq_len"}))
    ended = doctor(*pair, "--decode-flags", "--max-seq-len 8192")
    assert ended.status == 1
    assert "error max_seq_len: decode: max_seq_len: 16384\n" in ended.out
    assert doctor(*pair, "--decode-flags", "--max-seq-len 16384 --kv-block-size=32").status == 0


def test_two_whole_command_lines_need_no_files(pair: Files, doctor: Doctor) -> None:
    shared = "python3 -m dynamo.trtllm --model-path Qwen/Qwen3-8B --disaggregation-strategy prefill_first"
    prefill = f"{shared} --disaggregation-mode prefill --extra-engine-args {pair[0]}"
    decode = f"{shared} --disaggregation-mode decode --extra-engine-args {pair[1]}"
    ended = doctor("--prefill-flags", prefill, "--decode-flags", decode)
    assert ended.status == 0
    assert "TensorRT-LLM 1.3.0rc29, prefill_first" in ended.out
    flags = "--max-seq-len 8192 --trtllm.kv_cache_config.dtype fp8"
    ended = doctor("--prefill-flags", flags, "--decode-flags", "--max-seq-len 8192")
    assert ended.status == 1
    assert "error KV dtype" in ended.out


def test_model_and_template_of_flags_may_be_where_the_workers_start(pair: Files) -> None:
    there = "--model-path /in/container --custom-jinja-template /in/container/chat.jinja"
    assert status_of(*pair, "--prefill-flags", there, "--decode-flags", there) == 0
    assert status_of(*pair, "--model", "/in/container") == 1


def flags(words: str) -> list[str]:
    return ["--prefill-flags", words]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--trtllm-version", "new"], "--trtllm-version: 'new'"),
        (["--decode-gpus", "1,1"], "--decode-gpus: '1,1'"),
        (["--strategy", "both"], "--strategy"),
        (
            flags("--max-seq-lem 5"),
            "--prefill-flags: unknown flag --max-seq-lem; did you mean --max-seq-len?",
        ),
        (flags("--max-seq-len many"), "--prefill-flags: --max-seq-len: 'many'"),
        (flags("--disaggregation-mode decode"), "'decode' is not allowed; expected prefill"),
        (flags("--engine embedded"), "expected tensorrt_llm"),
        (flags("--extra-engine-args other.yaml"), "give one of them"),
        (flags("--override-engine-args {"), "--override-engine-args is not JSON"),
    ],
)
def test_bad_usage_ends_with_2(pair: Files, doctor: Doctor, more: list[str], told: str) -> None:
    ended = doctor(*pair, *more)
    assert ended.status == 2
    assert told in ended.err
