"""One pair that is fine, and for each rule that pair broken there and nowhere else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.engine.trtllm_version import NEWEST_KNOWN, TrtllmVersion
from trtllm_disagg.tools.doctor.diagnosis import diagnose
from trtllm_disagg.tools.doctor.pair import Pair, Stage, settings_of, stage_of
from trtllm_disagg.tools.doctor.rules import RULES, Finding

PREFILL: dict[str, Any] = {
    "max_seq_len": 16384,
    "max_num_tokens": 8192,
    "enable_chunked_prefill": True,
    "disable_overlap_scheduler": True,
    "guided_decoding_backend": "xgrammar",
    "kv_cache_config": {"dtype": "fp8", "enable_block_reuse": True},
    "cache_transceiver_config": {
        "backend": "NIXL",
        "transceiver_runtime": "PYTHON",
        "max_tokens_in_buffer": 16384,
        "kv_transfer_timeout_ms": 60000,
    },
}
DECODE = PREFILL | {"disable_overlap_scheduler": False, "max_batch_size": 128}

TRANSCEIVER = "cache_transceiver_config"
BACKEND, RUNTIME = f"{TRANSCEIVER}.backend", f"{TRANSCEIVER}.transceiver_runtime"
BUFFER, TIMEOUT = f"{TRANSCEIVER}.max_tokens_in_buffer", f"{TRANSCEIVER}.kv_transfer_timeout_ms"
REUSE, BLOCK_SIZE = "kv_cache_config.enable_block_reuse", "kv_cache_config.tokens_per_block"
WINDOW, EVENTS = "kv_cache_config.max_attention_window", "kv_cache_config.kv_events_config"
HOST, MANAGER = "kv_cache_config.host_cache_size", "kv_cache_config.use_kv_cache_manager_v2"
MEMORY, CP = "kv_cache_config.free_gpu_memory_fraction", "context_parallel_size"
ON_CPP, ON_UCX = {RUNTIME: "CPP"}, {RUNTIME: "CPP", BACKEND: "UCX"}
GENERATION_FIRST = {"schedule_style": "generation_first"}
GUIDES, CHUNKS = "guided_decoding_backend", "enable_chunked_prefill"
EVICTS = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
MTP = {"decoding_type": "MTP", "num_nextn_predict_layers": 1}
TWO_GPUS = {"gpus": ("0", "1")}
PIPELINED, BOUNCE = f"{TRANSCEIVER}.enable_pipelined_transfer", f"{TRANSCEIVER}.kv_cache_bounce_size_mb"
POLICY = "kv_cache_config.block_reuse_config.policy"
STEPS = {CHUNKS: False, "max_num_tokens": 16384}
#: As in TensorRT-LLM's features/helix.md.
HELIX: dict[str, Any] = {
    "context_parallel_size": 2,
    "cp_config": {"cp_type": "HELIX", "tokens_per_block": 32},
}
#: No key at all, where None is a value.
GONE = object()


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys."""
    content = copy.deepcopy(base)
    for key, value in changes.items():
        *way, name = key.split(".")
        owner = content
        for part in way:
            owner = owner.setdefault(part, {})
        owner[name] = value
        if value is GONE:
            del owner[name]
    return content


def stage(role: Role, given: dict[str, Any], file: object = "f.yaml", gpus: str = "", **more: str) -> Stage:
    version = TrtllmVersion.parse(more.pop("version", "1.3.0rc29"))
    return stage_of(settings_of(role, (), **more), str(file), given, version, {}, gpus=tuple(gpus.split()))


def diagnosed(
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    *,
    gpus: tuple[str, str] = ("", ""),
    version: str = "1.3.0rc29",
    kv_block_size: int | None = None,
    environ: dict[str, str] | None = None,
    **settings: str,
) -> list[Finding]:
    settings |= {"version": version}
    first = stage(Role.PREFILL, changed(PREFILL, prefill or {}), gpus=gpus[0], **settings)
    second = stage(Role.DECODE, changed(DECODE, decode or {}), gpus=gpus[1], **settings)
    return diagnose(Pair(first, second, TrtllmVersion.parse(version), environ or {}, kv_block_size))


def findings(rows: list[Finding]) -> dict[str, str]:
    return {row.rule: row.verdict for row in rows if row.verdict != "ok"}


def test_a_matching_pair_has_no_error_and_no_note() -> None:
    rows = diagnosed()
    assert findings(rows) == {}
    assert [row.rule for row in rows] == [*(rule.name for rule in RULES), "worker"]


def prefill(changes: dict[str, Any]) -> dict[str, Any]:
    return {"prefill": changes}


def decode(changes: dict[str, Any]) -> dict[str, Any]:
    return {"decode": changes}


def both(changes: dict[str, Any]) -> dict[str, Any]:
    return prefill(changes) | decode(changes)


def pipelined(changes: dict[str, Any]) -> dict[str, Any]:
    return both({PIPELINED: True, **changes}) | GENERATION_FIRST


#: Rule, its verdict, what to write instead, and what breaks it.
BROKEN: list[tuple[str, str, str, dict[str, Any]]] = [
    ("keys", "error", BLOCK_SIZE, decode({"kv_cache_config.tokens_per_blocks": 32})),
    ("keys", "error", "expected NIXL", prefill({BACKEND: "nixl"})),
    ("keys", "error", "max_batch_size: 'many'", decode({"max_batch_size": "many"})),
    ("keys", "error", "moe_config.backend", decode({"moe_config.bakend": "TRTLLM"})),
    ("keys", "note", "prefill: frobnicate is not an argument", prefill({"frobnicate": 1})),
    ("TensorRT-LLM", "error", "1.3.0rc22 or newer", {"version": "1.3.0rc21"}),
    ("TensorRT-LLM", "note", "up to 1.3.0rc29", {"version": "1.4.0"}),
    ("transceiver", "error", "decode: cache_transceiver_config", decode({TRANSCEIVER: None})),
    ("backend", "error", "cache_transceiver_config.backend", prefill(ON_UCX) | decode(ON_CPP)),
    ("backend", "error", "NIXL or UCX on both workers", both({**ON_CPP, BACKEND: "MPI"})),
    ("backend", "note", "name the backend", decode({BACKEND: "DEFAULT"})),
    ("transceiver_runtime", "error", "the same transceiver_runtime", decode(ON_CPP)),
    ("transceiver_runtime", "note", "each worker resolves auto", decode({RUNTIME: GONE})),
    ("transceiver_runtime", "error", "PYTHON on both workers", both(ON_CPP) | GENERATION_FIRST),
    ("transceiver_runtime", "error", "use_kv_cache_manager_v2: false", both({**ON_CPP, MANAGER: True})),
    ("pipelined transfer", "error", "--schedule-style generation_first; or", both({PIPELINED: True})),
    ("pipelined transfer", "error", "prefill: enable_chunked_prefill: true", pipelined(STEPS)),
    ("pipelined transfer", "error", "kv_cache_bounce_size_mb: 0", pipelined({BOUNCE: 64})),
    ("pipelined transfer", "error", "all_reusable", pipelined({POLICY: "per_conversation"})),
    ("kv_cache_bounce_size_mb", "note", "the same kv_cache_bounce_size_mb", prefill({BOUNCE: 64})),
    ("max_tokens_in_buffer", "error", "max_tokens_in_buffer: 16384", both({**ON_CPP, BUFFER: 4096})),
    ("max_tokens_in_buffer", "error", "a multiple of tokens_per_block", both({**ON_CPP, BUFFER: 16400})),
    ("max_tokens_in_buffer", "error", "max_tokens_in_buffer: 16384", both({**ON_CPP, BUFFER: 0})),
    ("max_tokens_in_buffer", "note", "longer prompts come through", prefill({BUFFER: 4096})),
    ("max_tokens_in_buffer", "note", "longer prompts come through", both({**ON_UCX, BUFFER: 4096})),
    ("max_tokens_in_buffer", "note", "at least the longest prompt", decode({BUFFER: GONE})),
    ("kv_transfer_timeout_ms", "error", "kv_transfer_timeout_ms: 60000", both({**ON_CPP, TIMEOUT: None})),
    ("kv_transfer_timeout_ms", "note", "the same kv_transfer_timeout_ms", decode({TIMEOUT: 1000})),
    ("keys", "error", "kv_transfer_timeout_ms: None: expected a finite", decode({TIMEOUT: None})),
    ("keys", "error", "expected CPP or auto with backend UCX", both({BACKEND: "UCX"})),
    ("overlap scheduler", "note", "decode: in every step", decode({"disable_overlap_scheduler": True})),
    ("KV dtype", "error", "the same kv_cache_config.dtype", decode({"kv_cache_config.dtype": "auto"})),
    ("dtype", "error", "the same dtype", decode({"dtype": "float16"})),
    ("attention window", "error", "max_attention_window", prefill({WINDOW: [4096, 32768]})),
    ("tokens_per_block", "error", "tokens_per_block: 64", prefill({BLOCK_SIZE: 64})),
    ("tokens_per_block", "error", "--kv-block-size 32", {"kv_block_size": 16}),
    ("tokens_per_block", "note", "blocks of 64", both({BLOCK_SIZE: 64})),
    ("KV events", "note", "decode: enable_block_reuse", decode({REUSE: False})),
    ("KV events", "note", "prefill: enable", prefill({REUSE: False}) | {"strategy": "prefill_first"}),
    ("KV events", "error", "polls KV events", decode({EVENTS: {"enable_kv_cache_events": True}})),
    ("max_beam_width", "error", "decode: max_beam_width: 1", decode({"max_beam_width": 4})),
    ("speculative decoding", "error", "the same speculative_config", prefill({"speculative_config": MTP})),
    ("host_cache_size", "error", "prefill: enable_block_reuse: true", prefill({HOST: 1 << 34, REUSE: False})),
    ("host_cache_size", "note", "prefill computes the prompts", decode({HOST: 1 << 34})),
    ("max_num_tokens", "error", "max_num_tokens: 16384", prefill({CHUNKS: False})),
    ("max_num_tokens", "note", "above 15000 tokens", prefill({CHUNKS: False, "max_num_tokens": 15000})),
    ("max_seq_len", "error", "decode: max_seq_len: 16384", decode({"max_seq_len": 8192})),
    ("switch", "note", "set the same max_seq_len", decode({"max_seq_len": 32768})),
    ("model", "note", "two names", prefill({"model": "org/m-FP4"}) | decode({"model": "org/m-FP8"})),
    (
        "model",
        "error",
        "the same revision",
        prefill({"model": "org/m", "revision": "a"}) | decode({"model": "org/m", "revision": "b"}),
    ),
    ("tokenizer", "error", "the same tokenizer", prefill({"tokenizer": "org/other"})),
    ("parallelism", "note", "pipeline stages", decode({"pipeline_parallel_size": 2})),
    ("parallelism", "error", "prefill: context_parallel_size: 1", prefill({CP: 2})),
    ("parallelism", "error", "transceiver_runtime: CPP", decode(HELIX)),
    ("GPUs", "error", "both have 0", {"gpus": ("0", "0")}),
    ("GPUs", "error", "TP2 PP1", decode({"tensor_parallel_size": 2}) | TWO_GPUS),
    ("GPUs", "error", "TP1 PP1 CP2", prefill(ON_CPP) | decode({**ON_CPP, CP: 2}) | TWO_GPUS),
    ("GPUs", "note", "both share GPU 0", both({MEMORY: 0.4}) | {"gpus": ("0", "0")}),
    ("CUDA graphs", "note", "more than 64 requests", decode({"cuda_graph_config": {"max_batch_size": 64}})),
    ("CUDA graphs", "note", "without CUDA graphs", decode({"cuda_graph_config": None})),
    ("guided decoding", "error", "the same guided_decoding_backend", decode({GUIDES: "llguidance"})),
    ("guided decoding", "note", "xgrammar", both({GUIDES: GONE})),
    ("guided decoding", "note", "GUARANTEED_NO_EVICT", decode({"scheduler_config": EVICTS})),
    ("NIXL plugins", "error", "folder does not exist", {"environ": {"NIXL_PLUGIN_DIR": "/no/such/folder"}}),
]


@pytest.mark.parametrize(
    ("rule", "verdict", "instead", "change"),
    BROKEN,
    ids=[f"{name}-{verdict}" for name, verdict, *_ in BROKEN],
)
def test_pair_with_one_fault_gets_exactly_that_finding(
    rule: str, verdict: str, instead: str, change: dict[str, Any]
) -> None:
    rows = diagnosed(**change)
    assert findings(rows) == {rule: verdict}
    (row,) = (row for row in rows if row.rule == rule)
    assert instead in row.instead
    assert row.why


def test_every_rule_has_a_pair_that_breaks_it() -> None:
    of_flags = {"flags", "strategy", "engine-stall-timeout", "parsers", "images"}  # in test_command.py
    assert {rule.name for rule in RULES} - of_flags == {name for name, *_ in BROKEN}


def test_pipelined_transfer_that_meets_its_conditions_is_fine() -> None:
    assert findings(diagnosed(**pipelined({}))) == {}
    (row,) = (row for row in diagnosed(**pipelined({"pipeline_parallel_size": 2})) if "pipelined" in row.rule)
    assert row.instead == "pipeline_parallel_size: 1; or enable_pipelined_transfer: false"


@pytest.mark.parametrize(
    ("version", "backend", "runtime", "verdict"),
    [
        ("1.3.0rc29", "NIXL", "auto", "ok"),
        ("1.3.0rc29", "UCX", "CPP", "note"),
        ("1.4.0rc1", "NIXL", "PYTHON", "ok"),
        ("1.4.0rc2", "UCX", "PYTHON", "error"),
    ],
)
def test_a_runtime_that_no_file_names_is_the_default_of_the_version(
    version: str, backend: str, runtime: str, verdict: str
) -> None:
    rows = diagnosed(**both({RUNTIME: GONE, BACKEND: backend}), version=version)
    (row,) = (row for row in rows if row.rule == "transceiver_runtime")
    assert (set(row.values.values()), row.verdict) == ({runtime}, verdict)


@pytest.mark.parametrize(("manager", "verdict"), [(GONE, "error"), (False, "note")])
def test_the_cpp_transceiver_of_1_4_needs_the_first_cache_manager(manager: object, verdict: str) -> None:
    rows = diagnosed(**both({**ON_CPP, MANAGER: manager}), version="1.4.0rc2")
    assert findings(rows) == {"TensorRT-LLM": "note", "transceiver_runtime": verdict}


def test_older_tensorrt_llm_gets_findings_of_its_missing_features() -> None:
    """Its transfers have no end by default, and its context servers do not overlap."""
    rows = diagnosed({"disable_overlap_scheduler": False, TIMEOUT: GONE}, version="1.2.1")
    assert findings(rows) == {
        "TensorRT-LLM": "error",
        "kv_transfer_timeout_ms": "error",
        "overlap scheduler": "error",
    }


BOTH_ON_AUTO = {RUNTIME: "auto", BUFFER: 4096}


@pytest.mark.parametrize(("version", "verdict"), [("1.3.0rc29", "note"), ("1.3.0rc22", "error")])
def test_a_small_buffer_is_an_error_where_auto_is_the_cpp_transceiver(version: str, verdict: str) -> None:
    rows = diagnosed(BOTH_ON_AUTO, BOTH_ON_AUTO, version=version)
    assert findings(rows)["max_tokens_in_buffer"] == verdict


def test_zero_max_tokens_in_buffer_of_the_python_transceiver_has_no_finding() -> None:
    no_bound = {BUFFER: 0}
    assert findings(diagnosed(no_bound, no_bound)) == {}


def test_empty_engine_files_give_notes_and_backend_nixl() -> None:
    rows = diagnose(Pair(stage(Role.PREFILL, {}), stage(Role.DECODE, {}), NEWEST_KNOWN, {}))
    assert findings(rows) == {
        "transceiver": "note",
        "max_tokens_in_buffer": "note",
        "max_num_tokens": "note",
        "guided decoding": "note",
    }
    (row,) = (row for row in rows if row.rule == "transceiver")
    assert row.values["prefill"] == "NIXL"


def test_setting_that_only_the_worker_refuses_is_the_row_worker(tmp_path: Path) -> None:
    """A file that passes all rules, and that the worker refuses all the same."""
    (tmp_path / "decode.yaml").write_text("backend: _autodeploy\n")
    second = stage(Role.DECODE, DECODE, tmp_path / "decode.yaml")
    rows = diagnose(Pair(stage(Role.PREFILL, PREFILL), second, NEWEST_KNOWN, {}))
    assert findings(rows) == {"worker": "error"}
    assert "expected pytorch" in rows[-1].instead or "'pytorch'" in rows[-1].instead


def test_context_parallelism_at_decode_has_no_finding() -> None:
    assert findings(diagnosed(prefill=ON_CPP, decode=HELIX | ON_CPP)) == {}


def test_gpus_beyond_those_that_a_worker_takes_are_not_shared() -> None:
    assert findings(diagnosed(gpus=("0 1 2", "1 2"))) == {}
    assert findings(diagnosed(gpus=("1 2", "1 0"))) == {"GPUs": "error"}


@pytest.mark.parametrize("name", ["gms_config", "checkpoint_format", "enable_tokenization_cache"])
def test_argument_known_to_tensorrt_llm_only_has_no_finding(name: str) -> None:
    assert findings(diagnosed({name: {}})) == {}


def test_several_faults_give_a_finding_each() -> None:
    rows = diagnosed({"max_beam_width": 2}, {"max_seq_len": 100, "dtype": "float16"})
    assert findings(rows) == {"max_beam_width": "error", "max_seq_len": "error", "dtype": "error"}
