"""Flags, YAML and JSON become the keyword arguments of LLM(...)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtllm_disagg.config.engine_args import (
    ENGINE_KEYS,
    KV_EVENT_BUFFER_SIZE,
    build_engine_args,
    dump_config,
    with_engine_args,
)
from trtllm_disagg.config.worker_config import SETTINGS, Role, WorkerConfig
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.errors import ConfigError


def build(tmp_path: Path, content: object = None, override: object = None, **values: Any) -> dict[str, Any]:
    if content is not None:
        path = tmp_path / "engine.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        values["extra_engine_args"] = str(path)
    if override is not None:
        values["override_engine_args"] = override if isinstance(override, str) else json.dumps(override)
    return build_engine_args(WorkerConfig(model="org/model", **values))


def refusal(tmp_path: Path, content: object = None, override: object = None, **values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, content, override, **values)
    return str(caught.value)


def test_without_a_file_the_engine_gets_what_dynamo_passes(tmp_path: Path) -> None:
    assert build(tmp_path) == {
        "model": "org/model",
        "load_format": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enable_attention_dp": False,
        "max_batch_size": 2048,
        "max_num_tokens": 8192,
        "max_beam_width": 1,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.9},
        "scheduler_config": {
            "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
            "dynamic_batch_config": {
                "enable_batch_size_tuning": True,
                "enable_max_num_tokens_tuning": False,
                "dynamic_batch_moving_average_window": 128,
            },
        },
        "return_perf_metrics": False,
        "enable_iter_perf_stats": False,
    }


def test_a_setting_with_the_name_of_an_engine_argument_is_passed_to_the_engine() -> None:
    not_passed = {name for name in SETTINGS if name in LlmArgs.model_fields} - ENGINE_KEYS.keys()
    # The worker reads the model from a directory, and frontends parse reasoning.
    assert not_passed == {"revision", "reasoning_parser"}, "engine_args.ENGINE_KEYS passes a setting on"


def test_engine_file_wins_over_flags_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Dynamo resolves the two."""
    content = {"max_batch_size": 7, "kv_cache_config": {"free_gpu_memory_fraction": 0.5}}
    with caplog.at_level(logging.WARNING):
        args = build(tmp_path, content, max_batch_size=8, max_num_tokens=9)
    assert args["max_batch_size"] == 7
    assert args["max_num_tokens"] == 9
    assert args["kv_cache_config"]["free_gpu_memory_fraction"] == 0.5
    (told,) = caplog.messages
    assert told.startswith("max_batch_size: 7 of ")
    assert told.endswith(" wins over --max-batch-size 8")
    build(tmp_path, {"max_batch_size": 8}, max_batch_size=8)
    assert len(caplog.messages) == 1, "they are equal"


def test_model_flag_wins_over_model_in_the_yaml(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Frontends make tokens for the one that the worker registers."""
    with caplog.at_level(logging.WARNING):
        args = build(tmp_path, {"model": "org/other"})
    assert args["model"] != "org/other"
    assert "wins over model: org/other" in caplog.text


def test_the_json_wins_over_everything(tmp_path: Path) -> None:
    override = {"max_batch_size": 1, "kv_cache_config": {"max_tokens": 96}}
    content = {"kv_cache_config": {"max_tokens": 64}, "cuda_graph_config": None}
    args = build(tmp_path, content, override, max_batch_size=8)
    assert args["max_batch_size"] == 1
    assert args["kv_cache_config"] == {"free_gpu_memory_fraction": 0.9, "max_tokens": 96}
    assert args["cuda_graph_config"] is None, "a null reaches the engine"


def test_empty_engine_file_is_like_no_file(tmp_path: Path) -> None:
    assert build(tmp_path, "# nothing yet\n") == build(tmp_path)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"max_num_token": 1}, ["engine.yaml", "max_num_token", "1", "did you mean max_num_tokens?"]),
        (
            {"kv_cache_config": {"free_gpu_mem_fraction": 0.5}},
            [
                "kv_cache_config.free_gpu_mem_fraction",
                "did you mean kv_cache_config.free_gpu_memory_fraction?",
            ],
        ),
        (
            {"scheduler_config": {"dynamic_batch_config": {"xyz": 1}}},
            ["scheduler_config.dynamic_batch_config.xyz", "allowed: dynamic_batch_moving_average_window"],
        ),
        ({"max_batch_size": "many"}, ["engine.yaml: max_batch_size", "'many'", "integer"]),
        ({"kv_cache_config": {"tokens_per_block": 48}}, ["tokens_per_block", "48", "a power of two"]),
        ({"kv_cache_config": 3}, ["kv_cache_config", "3"]),
        ("1: 2", ["engine.yaml: a key: 1 is not allowed; expected a text"]),
        ({"kv_cache_config": {"use_kv_cache_manager_v2": "no way"}}, ["use_kv_cache_manager_v2", "no way"]),
        ({"load_format": "fast"}, ["load_format", "'fast'", "one of auto, dummy"]),
        (
            {"cache_transceiver_config": {"backend": "nixl"}},
            ["cache_transceiver_config.backend", "'nixl'", "'NIXL'", "'SHARED_MEMORY'"],
        ),
        ({"sampler_type": "TRTLLMSampler"}, ["sampler_type", "TRTLLMSampler"]),
        ([1], ["engine.yaml", "list"]),
        ("a: [", ["engine.yaml: not YAML: expected", "in line 1, column 5"]),
        ("a: \0", ["engine.yaml: not YAML: unacceptable character #x0000: special characters are not"]),
        ("max_seq_len: 4" + " " * 1_000_000, ["engine.yaml", "more than 1000000 bytes long"]),
        *(
            (f"a: {tagged}", ["engine.yaml", "a tag, such as !!timestamp or !!int, on a value that is none"])
            for tagged in ("!!timestamp noon", "!!bool x", "!!int ''", "!!float 1" + ":1" * 4000)
        ),
        ("max_seq_len: 4\nmax_seq_len: 8", ["engine.yaml: max_seq_len is there twice, in lines 1 and 2"]),
        (
            "kv_cache_config: {\n  max_tokens: 4,\n  max_tokens: 4}",
            ["max_tokens is there twice", "lines 2 and 3"],
        ),
        ("kv_cache_config: &a\n  more: *a", ["engine.yaml", "line 1 contains itself"]),
        ("a: [\n&a [*a]]", ["engine.yaml", "line 2 contains itself"]),
        ("a: " + "[" * 300 + "]" * 300, ["engine.yaml", "nested more than 50 levels deep"]),
        ("a: " + "[" * 30_000, ["engine.yaml", "nested more than 50 levels deep"]),
        ({"backend": "tensorrt"}, ["backend", "'tensorrt'", "pytorch"]),
    ],
)
def test_a_bad_file_is_refused_with_file_key_value_and_what_is_allowed(
    tmp_path: Path, content: object, parts: list[str]
) -> None:
    message = refusal(tmp_path, content, engine="embedded")
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"max_num_token": 1}, ["max_num_token", "1", "did you mean max_num_tokens?"]),
        ({"max_batch_size": "many"}, ["engine.yaml: max_batch_size", "'many'", "integer"]),
        ({"tensor_parallel_size": 0}, ["engine.yaml: tensor_parallel_size: 0", "greater than 0"]),
        ({"stream_interval": 0}, ["stream_interval: 0", "greater than 0"]),
        (
            {"kv_cache_config": {"tokens_per_block": 48}},
            ["kv_cache_config.tokens_per_block: 48", "a power of two"],
        ),
        (
            {"kv_cache_config": {"free_gpu_memory_fraction": 1.5}},
            ["fraction: 1.5", "less than or equal to 1"],
        ),
        (
            {"kv_cache_config": {"kv_events_config": {"hwm": 0}}},
            ["kv_events_config.hwm: 0", "greater than 0"],
        ),
        ({"kv_cache_config": 3}, ["engine.yaml: kv_cache_config: 3", "dictionary"]),
        ({"moe_config": {"backend": "WIDEEP"}}, ["moe_config.backend: 'WIDEEP'", "'CUTLASS'"]),
        (
            {"cuda_graph_config": {"max_batch_size": "x"}},
            ["cuda_graph_config.max_batch_size: 'x'", "integer"],
        ),
        ({"cuda_graph_config": {"max_batch_sizes": 1}}, ["did you mean cuda_graph_config.max_batch_size?"]),
        ({"load_format": "fast"}, ["load_format: 'fast'", "one of auto, dummy, vision_only, gms"]),
        ({"scheduler_config": {"waiting_queue_policy": "x"}}, ["waiting_queue_policy: 'x'", "'fcfs'"]),
        ({"cache_transceiver_config": {"backend": "nixl"}}, ["'nixl'", "'UCX', 'NIXL', 'MOONCAKE' or 'MPI'"]),
        (
            {"cache_transceiver_config": {"backend": "UCX", "transceiver_runtime": "PYTHON"}},
            ["transceiver_runtime: 'PYTHON'", "CPP or auto with backend UCX"],
        ),
        (
            {"cache_transceiver_config": {"transceiver_runtime": "PYTHON", "kv_transfer_timeout_ms": None}},
            ["kv_transfer_timeout_ms: None", "a finite kv_transfer_timeout_ms"],
        ),
        ({"telemetry_config": 1}, ["telemetry_config: 1", "dictionary"]),
    ],
    ids=str,
)
def test_a_bad_file_for_tensorrt_llm_is_refused_by_its_own_declaration(
    tmp_path: Path, content: object, parts: list[str]
) -> None:
    message = refusal(tmp_path, content, engine="tensorrt_llm")
    assert [part for part in parts if part not in message] == []


def test_yaml_aliases_nested_too_deep_are_refused_and_fewer_are_read(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{b: *a{n - 1}}}" for n in range(1, 60)]
    message = refusal(tmp_path, "\n".join(lines))
    assert "nested more than 50 levels deep" in message
    build(tmp_path, "\n".join(lines[:45]))


@pytest.mark.parametrize("line", ["{b: *A, c: *A}", "[*A, *A, *A, *A]", "{<<: [*A, *A, *A, *A]}"])
def test_yaml_aliases_that_stand_for_too_many_values_are_refused_at_once(tmp_path: Path, line: str) -> None:
    """A few hundred bytes, which a reader that copies them could not hold in memory."""
    first = "[x]" if line.startswith("[") else "{x: 1}"
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{n}: &a{n} {line.replace('*A', f'*a{n - 1}')}" for n in range(1, 22)]
    assert "has more than 1000000 values, by aliases" in refusal(tmp_path, "\n".join(lines))


def test_a_bad_override_and_a_missing_file_name_their_flag(tmp_path: Path) -> None:
    assert "--override-engine-args is not JSON" in refusal(tmp_path, override="{'a': 1}")
    assert "--override-engine-args: max_batch_size: 'x'" in refusal(
        tmp_path, override={"max_batch_size": "x"}
    )
    assert "--override-engine-args: expected keys" in refusal(tmp_path, override="[]")
    missing = refusal(tmp_path, extra_engine_args="/no/such.yaml")
    assert missing.startswith("--extra-engine-args: '/no/such.yaml'")


@pytest.mark.parametrize("engine", ["auto", "tensorrt_llm"])
def test_a_key_that_only_tensorrt_llm_knows_is_left_to_it(tmp_path: Path, engine: str) -> None:
    content = {"nvfp4_gemm_config": {"x": 1}, "kv_cache_config": {"mamba_ssm_cache_dtype": "float32"}}
    args = build(tmp_path, content, engine=engine)
    assert args["nvfp4_gemm_config"] == {"x": 1}
    assert args["kv_cache_config"]["mamba_ssm_cache_dtype"] == "float32"
    assert "did you mean max_num_tokens?" in refusal(tmp_path, {"max_num_token": 1}, engine=engine)


def test_embedded_only_key_is_refused_for_tensorrt_llm(tmp_path: Path) -> None:
    values = {"engine": "tensorrt_llm"}
    assert "embedded" in refusal(tmp_path, {"embedded": {"num_threads": 2}}, **values)
    assert "modelled" in refusal(tmp_path, {"modelled": {"gpu": "h100"}}, **values)
    assert "recording" in refusal(tmp_path, {"recording": {}}, engine="modelled")
    shared_memory = {"cache_transceiver_config": {"backend": "SHARED_MEMORY"}}
    assert "'SHARED_MEMORY'" in refusal(tmp_path, shared_memory, **values)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_of_a_pair_needs_a_transceiver(tmp_path: Path, role: str) -> None:
    message = refusal(tmp_path, {"cache_transceiver_config": {"backend": None}}, role=role)
    assert "engine.yaml: cache_transceiver_config.backend: None" in message
    assert build(tmp_path, role=role)["cache_transceiver_config"] == {"backend": "DEFAULT"}
    transceiver = {"cache_transceiver_config": {"backend": "NIXL"}}
    assert build(tmp_path, transceiver, role=role)["cache_transceiver_config"]["backend"] == "NIXL"
    assert "max_beam_width: 2" in refusal(tmp_path, {**transceiver, "max_beam_width": 2}, role=role)


def test_several_beams_are_refused_for_tensorrt_llm(tmp_path: Path) -> None:
    """It serves no request of another width, and requests have one beam here."""
    assert "max_beam_width: 4" in refusal(tmp_path, engine="tensorrt_llm", max_beam_width=4)
    assert "max_beam_width: 2" in refusal(tmp_path, {"max_beam_width": 2}, engine="tensorrt_llm")


def test_different_block_sizes_in_flag_and_file_are_refused(tmp_path: Path) -> None:
    content = {"kv_cache_config": {"tokens_per_block": 16}}
    message = refusal(tmp_path, content, kv_block_size=64)
    assert [part for part in ("tokens_per_block: 16", "--kv-block-size", "64") if part not in message] == []
    refusal(tmp_path, content, explicit=frozenset({"kv_block_size"}))
    assert "--override-engine-args" in refusal(tmp_path, override=content, kv_block_size=64)


def test_block_size_of_flag_or_file_sets_the_other(tmp_path: Path) -> None:
    from_flag = build(tmp_path, kv_block_size=64)
    assert from_flag["kv_cache_config"]["tokens_per_block"] == 64
    from_file = build(tmp_path, {"kv_cache_config": {"tokens_per_block": 16}})
    assert from_file["kv_cache_config"]["tokens_per_block"] == 16
    assert with_engine_args(WorkerConfig(model="m"), from_file).kv_block_size == 16


def test_publishing_events_opens_the_event_buffer(tmp_path: Path) -> None:
    kv = build(tmp_path, publish_kv_events=True)["kv_cache_config"]
    assert kv["event_buffer_max_size"] == KV_EVENT_BUFFER_SIZE == 100_000
    own = build(tmp_path, {"kv_cache_config": {"event_buffer_max_size": 5}}, publish_kv_events=True)
    assert own["kv_cache_config"]["event_buffer_max_size"] == 5
    assert "event_buffer_max_size" not in build(tmp_path)["kv_cache_config"]


def test_publishing_events_cannot_work_with_pushed_events_or_well_without_block_reuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(tmp_path, {"kv_cache_config": {"enable_block_reuse": False}}, publish_kv_events=True)
    assert "enable_block_reuse" in caplog.text
    pushed = {"kv_cache_config": {"kv_events_config": {"enable_kv_cache_events": True}}}
    assert "kv_events_config.enable_kv_cache_events" in refusal(tmp_path, pushed, publish_kv_events=True)


def test_statistics_that_metrics_read_are_turned_on_and_are_better_of_every_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    off, rare = {"enable_iter_perf_stats": False}, {"iter_perf_stats_interval": 8}
    build(tmp_path, off | rare, engine="tensorrt_llm")
    assert caplog.text == ""
    args = build(tmp_path, off, engine="tensorrt_llm", publish_metrics=True)
    assert args["enable_iter_perf_stats"] is True
    assert "enable_iter_perf_stats is set to true: --publish-metrics reads them" in caplog.text
    build(tmp_path, rare, engine="tensorrt_llm", publish_metrics=True)
    assert "iter_perf_stats_interval 8" in caplog.text


def test_dynamo_decides_backend_and_postprocessing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = build(tmp_path, {"backend": "pytorch", "num_postprocess_workers": 4})
    assert "backend" not in args
    assert "num_postprocess_workers" not in args
    assert "num_postprocess_workers" in caplog.text


def test_the_model_card_gets_the_sizes_that_the_engine_gets(tmp_path: Path) -> None:
    args = build(tmp_path, {"max_seq_len": 99, "max_num_tokens": 5, "max_batch_size": 3})
    config = with_engine_args(WorkerConfig(model="m"), args)
    assert (config.max_seq_len, config.max_num_tokens, config.max_batch_size) == (99, 5, 3)


@pytest.mark.parametrize(
    ("content", "settings", "size"),
    [
        (None, {}, None),
        ({"kv_cache_config": {"dtype": "fp8"}}, {}, None),
        *(
            (None, {"kv_block_size": size, "explicit": frozenset({"kv_block_size"})}, size)
            for size in (32, 64)
        ),
    ],
)
def test_only_the_block_size_of_a_flag_reaches_the_engine(
    tmp_path: Path, content: object, settings: dict[str, Any], size: int | None
) -> None:
    """TensorRT-LLM takes another one for some models (`get_model_defaults`), unless it is given one."""
    args = build(tmp_path, content, engine="tensorrt_llm", **settings)
    assert args["kv_cache_config"].get("tokens_per_block") == size
    assert with_engine_args(WorkerConfig(model="m"), args).kv_block_size == (size or 32)


def test_config_dump_has_engine_and_worker_arguments_and_no_password(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    config = WorkerConfig(
        model="m",
        role=Role.PREFILL,
        nats_server="nats://me:secret@h:1",
        dump_config_to=str(file),
        explicit=frozenset({"role", "model"}),
    )
    dump_config(config, {"max_batch_size": 8})
    content = json.loads(file.read_text())
    assert content["engine_args"] == {"max_batch_size": 8}
    assert content["dynamo_args"]["role"] == "prefill"
    assert content["dynamo_args"]["explicit"] == ["model", "role"]
    assert content["dynamo_args"]["nats_server"] == "nats://***@h:1"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    config = WorkerConfig(model="m", dump_config_to=str(tmp_path / "no" / "folder"))
    with pytest.raises(ConfigError, match=r"--dump-config-to: .*a file that can be written"):
        dump_config(config, {})
