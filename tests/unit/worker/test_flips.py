"""What of an engine's settings keeps its worker from the other role, and what is only said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trtllm_disagg.config.engine_args import build_engine_args, with_engine_args
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine_facts import EngineFacts
from trtllm_disagg.errors import ConfigError, InvalidRequestError
from trtllm_disagg.worker.flips import RoleSettings, check_flip
from trtllm_disagg.worker.model_facts import UNKNOWN_MODEL
from trtllm_disagg.worker.pairing import Fingerprint, ModelIdentity, describe_worker

ROOT = Path(__file__).parents[3]
MODELS = sorted(
    path.parent.name
    for path in ROOT.glob("engine_configs/*/flex.yaml")
    if path.parent.name not in ("demo", "modelled")
)
VERSION = "1.3.0rc29"


def described(role: str, given: dict[str, Any], environ: dict[str, str] | None = None) -> dict[str, Any]:
    """A worker's description on an engine with these arguments, as the other workers read it."""
    args: dict[str, Any] = {"cache_transceiver_config": {"backend": "NIXL"}, "max_batch_size": 256} | given
    config = with_engine_args(WorkerConfig(model="org/m", role=Role(role), engine="tensorrt_llm"), args)
    fingerprint = Fingerprint.of("tensorrt_llm", args, 32, UNKNOWN_MODEL, VERSION)
    own = describe_worker(config, fingerprint, ModelIdentity("m", "org/m", "w", role=role))
    num_ranks = args["tensor_parallel_size"] if args.get("enable_attention_dp") else 1
    facts = EngineFacts(args.get("max_seq_len"), None, False, args["max_batch_size"], num_ranks)
    return own | RoleSettings.of(args, environ or {}).to_json() | facts.to_json()


def flip(
    to: str,
    own: dict[str, Any],
    alike: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    *,
    force: bool = False,
) -> list[str]:
    """Of a worker with the arguments `own`, to one of its new role with `alike`; another one of its role stays."""
    before = "decode" if to == "prefill" else "prefill"
    others = [described(to, alike or {}), described(before, own)]
    return check_flip(described(to, own, environ), others, force=force)


NO_GRAPHS = {"cuda_graph_config": None}
GRAPHS = r"cuda_graph_config: null \(expected graphs\): without CUDA graphs every step pays"
REUSE_OFF = {"kv_cache_config": {"enable_block_reuse": False}}


@pytest.mark.parametrize(
    ("to", "own", "alike", "environ", "named"),
    [
        ("decode", NO_GRAPHS, {}, {}, GRAPHS),
        ("decode", NO_GRAPHS, NO_GRAPHS, {}, GRAPHS),
        ("decode", {"max_batch_size": 127}, {}, {}, r"max_batch_size: 127 \(expected at least 128\)"),
        (
            "decode",
            {"max_batch_size": 4, "enable_attention_dp": True, "tensor_parallel_size": 4},
            {"max_batch_size": 32, "enable_attention_dp": True, "tensor_parallel_size": 32},
            {},
            r"slots of all ranks: 16 \(expected at least 512\)",
        ),
        ("decode", REUSE_OFF, {}, {}, r"kv_cache_config\.enable_block_reuse: false \(expected true\)"),
        ("prefill", REUSE_OFF, {}, {}, r"kv_cache_config\.enable_block_reuse: false \(expected true\)"),
        (
            "decode",
            {"disable_overlap_scheduler": True},
            {},
            {},
            r"disable_overlap_scheduler: true \(expected false\)",
        ),
        *(
            (to, {}, {}, {"TRTLLM_DISAGG_ROLE": value}, f"TRTLLM_DISAGG_ROLE: {value} .* for {other} alone")
            for to, value, other in (
                ("decode", "context", "prefill"),
                ("decode", "ctx0", "prefill"),
                ("prefill", "generation", "decode"),
                ("prefill", "GEN1", "decode"),
            )
        ),
        (
            "prefill",
            {},
            {},
            {"TRTLLM_DISAGG_BENCHMARK_GEN_ONLY": "1"},
            "TRTLLM_DISAGG_BENCHMARK_GEN_ONLY: 1 .* for decode alone",
        ),
    ],
)
def test_a_flip_that_would_be_very_slow_needs_force_and_is_then_said(
    to: str, own: dict[str, Any], alike: dict[str, Any], environ: dict[str, str], named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"^to: '{to}' is not allowed with {named}.* \\(--force"):
        flip(to, own, alike, environ)
    (warning, *_) = flip(to, own, alike, environ, force=True)
    assert warning.startswith(named.partition(" ")[0].replace("\\", ""))


@pytest.mark.parametrize(
    ("to", "own", "alike", "warnings"),
    [
        ("decode", {}, {}, []),
        ("prefill", NO_GRAPHS, {}, []),
        ("prefill", {"disable_overlap_scheduler": True}, {}, []),
        ("decode", {"max_batch_size": 128}, {}, []),
        ("decode", REUSE_OFF, REUSE_OFF, []),
        (
            "decode",
            {"cuda_graph_config": {"max_batch_size": 64}},
            {},
            [
                "cuda_graph_config.max_batch_size: 64 (expected 256): steps of more than 64 requests run without a"
            ],
        ),
        (
            "prefill",
            {"max_batch_size": 4, "max_num_tokens": 1024},
            {"max_num_tokens": 8192},
            ["max_batch_size: 4 (expected at least 128)", "max_num_tokens: 1024 (expected at least 4096)"],
        ),
        (
            "decode",
            {"pipeline_parallel_size": 2, "cache_transceiver_config": {"backend": "UCX"}},
            {"cache_transceiver_config": {"backend": "UCX"}},
            ["TP1 PP2 (expected TP1 PP1): its steps take another time"],
        ),
        (
            "decode",
            {"tensor_parallel_size": 2},
            {"tensor_parallel_size": 4, "moe_expert_parallel_size": 4},
            [
                "TP2 PP1 (expected TP4 PP1 EP4): its steps take another time",
                "TP2 PP1 (expected one GPU, or transceiver_runtime: CPP): the Python transceiver keeps the marks",
            ],
        ),
    ],
)
def test_what_is_only_different_is_a_warning(
    to: str, own: dict[str, Any], alike: dict[str, Any], warnings: list[str]
) -> None:
    said = flip(to, own, alike)
    assert [each[: len(text)] for each, text in zip(said, warnings, strict=True)] == warnings


def test_a_role_variable_of_the_new_role_is_no_reason_against_it() -> None:
    assert flip("decode", {}, environ={"TRTLLM_DISAGG_ROLE": "generation"}) == []
    assert flip("decode", {}, environ={"TRTLLM_DISAGG_ROLE": "coordinator"}) == []


def test_force_does_not_flip_what_can_never_work() -> None:
    with pytest.raises(InvalidRequestError, match="max_seq_len 1024; here it is 512"):
        flip("decode", NO_GRAPHS | {"max_seq_len": 512}, {"max_seq_len": 1024}, force=True)
    others = [described("prefill", {"kv_cache_config": {"dtype": "fp8"}})]
    with pytest.raises(ConfigError, match=r"kv_cache_config\.dtype"):
        check_flip(described("decode", {}), others, force=True)


def test_of_a_worker_of_another_version_nothing_is_known_and_nothing_held_against_it() -> None:
    known = described("decode", {})
    old = {key: known[key] for key in known if key not in RoleSettings.__struct_fields__}
    odd = old | {"largest_graph": "many", "max_batch_size": 256}
    for other in (old, odd):
        assert check_flip(known, [other, described("prefill", {})], force=False) == []


# -- the shipped files


def shipped(model: str, name: str, role: str) -> dict[str, Any]:
    path = ROOT / "engine_configs" / model / f"{name}.yaml"
    config = WorkerConfig(model="org/m", role=Role(role), engine="tensorrt_llm", extra_engine_args=str(path))
    return described(role, build_engine_args(config))


@pytest.mark.parametrize("model", MODELS)
def test_workers_with_flex_files_flip_beside_each_other_and_those_with_role_files_need_force(
    model: str,
) -> None:
    flex = yaml.safe_load((ROOT / f"engine_configs/{model}/flex.yaml").read_text())
    sticky = flex["tensor_parallel_size"] > 1 and flex["cache_transceiver_config"]["backend"] == "NIXL"
    for to, before in (("decode", "prefill"), ("prefill", "decode")):
        beside = [shipped(model, "flex", role) for role in (to, before)]
        warnings = check_flip(shipped(model, "flex", to), beside, force=False)
        assert len(warnings) == sticky
    peers = [shipped(model, name, name) for name in ("decode", "prefill")]
    with pytest.raises(InvalidRequestError, match=r"disable_overlap_scheduler: true .*--force"):
        check_flip(shipped(model, "prefill", "decode"), peers, force=False)


# With images, decode and so flex reuse no blocks, but prefill does.
@pytest.mark.parametrize("model", [model for model in MODELS if model != "qwen2.5-vl"])
def test_a_worker_with_a_flex_file_joins_those_with_role_files(model: str) -> None:
    for to, before in (("decode", "prefill"), ("prefill", "decode")):
        beside = [shipped(model, to, to), shipped(model, before, before)]
        check_flip(shipped(model, "flex", to), beside, force=False)
