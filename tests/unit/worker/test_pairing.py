"""Two workers that cannot work together are told why, before either serves; and what their model directories say."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import trtllm_disagg
from tests.conftest import Checkpoints
from trtllm_disagg.common.model_directory import fingerprint
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.worker.model_facts import UNKNOWN_MODEL, ModelFacts, read_model_facts
from trtllm_disagg.worker.pairing import (
    Fingerprint,
    ModelIdentity,
    describe_worker,
    group_of,
    require_fit,
    require_pair,
)

ARGS: dict[str, Any] = {"kv_cache_config": {"dtype": "auto"}, "cache_transceiver_config": {"backend": "NIXL"}}


def described(
    role: str,
    args: dict[str, Any] | None = None,
    block_size: int = 32,
    weights: str = "ab",
    facts: ModelFacts = UNKNOWN_MODEL,
    trtllm_version: str | None = "1.3.0rc29",
    environ: dict[str, str] | None = None,
    **config: Any,
) -> dict[str, Any]:
    settings = {"model": "org/model", "engine": "embedded", "role": Role(role)} | config
    worker = WorkerConfig(**settings)
    identity = ModelIdentity(worker.model_name, worker.model, weights, facts.layout, facts.precision, role)
    fingerprint = Fingerprint.of(
        worker.engine, ARGS | (args or {}), block_size, facts, trtllm_version, environ
    )
    crossed: dict[str, Any] = json.loads(json.dumps(describe_worker(worker, fingerprint, identity)))
    return crossed


@pytest.mark.parametrize(
    ("version", "runtime"),
    [(None, "auto"), ("1.3.0rc29", "auto"), ("1.4.0rc1", "PYTHON"), ("of ours", "auto")],
)
def test_runtime_that_no_file_names_is_the_versions_default(version: str | None, runtime: str) -> None:
    args = {"cache_transceiver_config": {"backend": "NIXL"}}
    found = Fingerprint.of("tensorrt_llm", args, 32, UNKNOWN_MODEL, version)
    assert found.transceiver_runtime == runtime


def test_a_default_that_means_two_transports_is_refused() -> None:
    prefill, decode = (
        described(role) | {"kv_transport": transport}
        for role, transport in (("prefill", "SHARED_MEMORY"), ("decode", "NIXL"))
    )
    with pytest.raises(
        ConfigError, match=r"cache_transceiver_config\.backend .* 'SHARED_MEMORY', decode 'NIXL'"
    ):
        require_pair(prefill, decode)
    require_pair(described("prefill"), decode)  # which is not known before the engine is loaded


def test_a_worker_describes_what_has_to_be_equal() -> None:
    assert described("prefill", {"dtype": "float32"}, served_model_name="m") == {
        "role": "prefill",
        "strategy": "decode_first",
        "schedule_style": "context_first",
        "handoff_protocol": "dynamo",
        "prefill_dispatch": "direct",
        "revision": None,
        "images": False,
        "engine": "embedded",
        "model": "m",
        "block_size": 32,
        "dtype": "float32",
        "kv_dtype": "float32",
        "transceiver": "NIXL",
        "transceiver_runtime": None,
        "trtllm_version": None,
        "speculative": None,
        "max_seq_len": None,
        "layout": "",
        "precision": "",
        "is_run_by_workers": False,
        "source": "org/model",
        "weights": "ab",
        "kv_transport": None,
        "ctx_info_endpoint": None,
        "ctx_dp_rank": None,
        "versions": {"trtllm_disagg": trtllm_disagg.__version__, "ai_dynamo": metadata.version("ai-dynamo")},
    }


def test_workers_of_02_and_of_this_version_share_no_queue() -> None:
    prefill = described("prefill", prefill_dispatch="queue")
    require_pair(prefill, described("decode", prefill_dispatch="queue"))
    with pytest.raises(ConfigError, match="prefill 'queue of tickets', decode 'queue'"):
        require_pair(prefill, described("decode") | {"prefill_dispatch": "queue"})


def test_fingerprint_of_null_settings_has_defaults() -> None:
    fingerprint = Fingerprint.of("embedded", {"kv_cache_config": None}, 16)
    assert (fingerprint.dtype, fingerprint.kv_dtype, fingerprint.transceiver) == ("auto", "auto", None)


def kv_cache(**settings: Any) -> dict[str, Any]:
    return {"args": {"kv_cache_config": settings}}


def transceiver(**settings: Any) -> dict[str, Any]:
    return {"args": {"cache_transceiver_config": {"backend": "NIXL"} | settings}}


TRT: dict[str, Any] = {"engine": "tensorrt_llm"}
FP8_KV: dict[str, Any] = {"kv_cache_config": {"dtype": "fp8"}}
MTP: dict[str, Any] = {"decoding_type": "MTP", "max_draft_len": 2}
BY_UCX = transceiver(backend="DEFAULT") | {"environ": {"TRTLLM_USE_UCX_KVCACHE": "1"}}


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [
        ({"block_size": 16}, {}, "kv_cache_config.tokens_per_block (--kv-block-size): prefill 16, decode 32"),
        ({"engine": "embedded"}, {}, "--engine: prefill 'embedded', decode 'tensorrt_llm'"),
        (
            {"strategy": "prefill_first"},
            {},
            "--disaggregation-strategy: prefill 'prefill_first', decode 'decode_first'",
        ),
        (
            {"prefill_dispatch": "queue"},
            {},
            "--prefill-dispatch: prefill 'queue of tickets', decode 'direct'",
        ),
        ({"served_model_name": "x"}, {}, "--served-model-name: prefill 'x', decode 'org/model'"),
        ({"worker_revision": "v2"}, {}, "--worker-revision: prefill 'v2', decode None"),
        ({"weights": "cd"}, {}, "--model (hash of config.json and weights): prefill 'cd', decode 'ab'"),
        (kv_cache(dtype="fp8"), {}, "kv_cache_config.dtype: prefill 'fp8', decode 'auto'"),
        (transceiver(backend="UCX"), {}, "cache_transceiver_config.backend: prefill 'UCX', decode 'NIXL'"),
        (
            {"args": FP8_KV | {"dtype": "bfloat16"}},
            {"args": FP8_KV},
            "dtype: prefill 'bfloat16', decode 'auto'",
        ),
        (
            {"trtllm_version": "1.3.0rc28"},
            {},
            "version of TensorRT-LLM: prefill '1.3.0rc28', decode '1.3.0rc29'",
        ),
        (
            transceiver(transceiver_runtime="CPP"),
            transceiver(transceiver_runtime="PYTHON"),
            "cache_transceiver_config.transceiver_runtime: prefill 'CPP', decode 'PYTHON'",
        ),
        (
            {"args": {"speculative_config": MTP}},
            {},
            "speculative_config: prefill 'decoding_type=MTP max_draft_len=2', decode None",
        ),
        (
            {"args": {"max_seq_len": 4096}},
            {"args": {"max_seq_len": 2048}},
            "max_seq_len: prefill 4096, decode 2048",
        ),
        ({"enable_multimodal": True}, {}, "--enable-multimodal: prefill True, decode False"),
        (BY_UCX, {}, "cache_transceiver_config.backend: prefill 'UCX', decode 'NIXL'"),
    ],
)
def test_a_difference_names_the_setting_and_both_values(
    prefill: dict[str, Any], decode: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        require_pair(described("prefill", **TRT | prefill), described("decode", **TRT | decode))
    assert str(caught.value).endswith(f"; {named}")


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        require_pair(described("decode"), described("decode", block_size=8, engine="tensorrt_llm"))
    message = str(caught.value)
    assert "--disaggregation-mode: both workers are decode" in message
    assert message.count(";") == 3


def test_agg_worker_is_refused_as_a_stage() -> None:
    with pytest.raises(ConfigError, match="--disaggregation-mode: no stage of agg is called by prefill"):
        require_pair(described("prefill"), described("agg"))


FP4 = {"weights": "four", "facts": ModelFacts("bfloat16", "bfloat16", "nvfp4", layout="same")}
FP8 = {"weights": "eight", "facts": ModelFacts("bfloat16", "bfloat16", "fp8", layout="same")}
EAGLE: dict[str, Any] = {"decoding_type": "Eagle", "max_draft_len": 4, "speculative_model": "draft"}
BY_OTHER_NAME = {"decoding_type": "Eagle", "max_draft_len": 4, "speculative_model_dir": "draft"}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param({"args": {"max_seq_len": 2048}}, {"args": {"max_seq_len": 4096}}, id="room for more"),
        pytest.param({"args": {"max_seq_len": 2048}}, {}, id="a length that only the engine knows"),
        pytest.param({"trtllm_version": None}, {}, id="a version that is not told"),
        pytest.param(transceiver(backend="DEFAULT"), {}, id="DEFAULT is NIXL"),
        pytest.param(
            {"args": FP8_KV}, {"facts": ModelFacts("bfloat16", "fp8", "nvfp4")}, id="auto that becomes fp8"
        ),
        pytest.param(transceiver(transceiver_runtime="PYTHON"), {}, id="the engine chooses the runtime"),
        pytest.param(
            {"args": {"speculative_config": EAGLE}},
            {"args": {"speculative_config": BY_OTHER_NAME}},
            id="one key by its two names",
        ),
        pytest.param(FP4, FP8, id="one model in two precisions"),
        pytest.param({}, {"enable_multimodal": True}, id="images that prefill refuses"),
    ],
)
def test_equivalent_settings_are_a_pair(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    facts = {"facts": ModelFacts("bfloat16", "bfloat16")}
    require_pair(described("prefill", **TRT | facts | prefill), described("decode", **TRT | facts | decode))


@pytest.mark.parametrize(
    "decode",
    [
        pytest.param(FP8 | {"facts": ModelFacts("bfloat16", "bfloat16", "fp8", layout="other")}, id="shape"),
        pytest.param(FP8 | {"facts": ModelFacts("bfloat16", "bfloat16", "fp8")}, id="no shape known"),
        pytest.param(FP4 | {"weights": "changed"}, id="one precision, two checkpoints"),
        pytest.param(FP8 | {"args": FP8_KV}, id="KV of another dtype"),
        pytest.param(FP8 | {"prefill_dispatch": "queue"}, id="a queue has workers of one kind"),
    ],
)
def test_two_checkpoints_that_differ_in_more_than_precision_are_no_pair(decode: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        require_pair(described("prefill", **TRT | FP4), described("decode", **TRT | decode))


def test_max_seq_len_known_to_one_engine_does_not_change_the_queue_kind() -> None:
    one, other = (described("prefill", {"max_seq_len": length}, **TRT) for length in (2048, None))
    assert group_of(one) == group_of(other)


@pytest.mark.parametrize("answer", [{}, {"token_ids": [1], "finish_reason": "stop"}])
def test_answer_that_is_no_description_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="prefill 'embedded', None None"):
        require_pair(described("prefill"), answer)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("max_seq_len", "4096", "max_seq_len"),
        ("transceiver_runtime", [], "transceiver_runtime"),
        ("kv_transport", {}, "how KV moves"),
        ("trtllm_version", [], "version of TensorRT-LLM"),
        ("role", ["prefill"], "--disaggregation-mode"),
        ("handoff_protocol", None, "--handoff-protocol: decode 'dynamo', prefill None"),
    ],
)
def test_value_of_another_type_or_none_is_a_difference(key: str, value: Any, named: str) -> None:
    own = described("decode") | {"max_seq_len": 4096}
    theirs = described("prefill") | {key: value}
    if value is None:
        del theirs[key]
    with pytest.raises(ConfigError, match=named):
        require_pair(own, theirs)


@pytest.mark.parametrize(
    "other",
    [
        {"role": "agg"},
        {"role": "decode"},
        {"role": "prefill", "strategy": "prefill_first"},
        {"role": "prefill", "served_model_name": "another"},
    ],
)
def test_workers_of_other_deployments_are_not_compared(other: dict[str, Any]) -> None:
    others = [described("prefill"), described(block_size=64, **other)]
    require_fit(described("decode"), others)
    with pytest.raises(ConfigError, match="decode 32, prefill 64"):
        require_fit(described("decode"), [*others, described("prefill", block_size=64)])


def test_two_models_behind_one_name_do_not_fit(checkpoints: Checkpoints) -> None:
    one, other = (fingerprint(checkpoints(seed=seed)) for seed in (0, 1))
    assert one == fingerprint(checkpoints(seed=0))
    with pytest.raises(ConfigError, match=rf"--model \(hash .*\): decode '{one}', prefill '{other}'"):
        require_fit(described("decode", weights=one), [described("prefill", weights=other)])


def on(runtime: str, **args: Any) -> dict[str, Any]:
    return {"cache_transceiver_config": {"backend": "NIXL", "transceiver_runtime": runtime}} | args


#: As TensorRT-LLM's own tests of pairs have them (accuracy/test_disaggregated_serving.py).
PYTHON_MTP = on("PYTHON", speculative_config=MTP)
NGRAM = {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 4}


@pytest.mark.parametrize(
    ("runtime", "drafts"),
    [("CPP", NGRAM), ("PYTHON", NGRAM), ("PYTHON", MTP), ("PYTHON", EAGLE), ("auto", MTP)],
)
def test_decode_alone_may_draft(runtime: str, drafts: dict[str, Any]) -> None:
    prefill = described("prefill", on(runtime), **TRT)
    decode = described("decode", on(runtime, speculative_config=drafts), **TRT)
    require_pair(prefill, decode)
    require_pair(decode, prefill)
    assert group_of(prefill) == group_of(decode)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(on("CPP"), on("CPP", speculative_config=MTP), id="draft layers on the C++ transceiver"),
        pytest.param(PYTHON_MTP, on("PYTHON", speculative_config=NGRAM), id="two methods"),
        pytest.param(PYTHON_MTP, on("PYTHON"), id="a decode that takes no drafts"),
    ],
)
def test_drafts_that_decode_cannot_take_are_refused(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="speculative_config"):
        require_pair(described("prefill", prefill, **TRT), described("decode", decode, **TRT))


# -- precision and shape, as model directories say them


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def model(folder: Path, config: dict[str, Any], modelopt: dict[str, Any] | None = None) -> ModelFacts:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    if modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": modelopt}))
    return read_model_facts(folder)


INSIDE = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": {"type": "float", "num_bits": 8},
}


@pytest.mark.parametrize(
    ("quantization", "modelopt", "kv_dtype", "precision"),
    [
        pytest.param(None, None, "bfloat16", "", id="not quantised"),
        pytest.param(
            None, {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "fp8", "nvfp4", id="modelopt"
        ),
        pytest.param(None, {"quant_algo": "FP8"}, "bfloat16", "fp8", id="weights only"),
        pytest.param({"quant_method": "fp8"}, None, "bfloat16", "fp8", id="block fp8"),
        pytest.param(INSIDE, None, "fp8", "fp8", id="modelopt inside config.json"),
    ],
)
def test_auto_becomes_the_checkpoints_dtype(
    tmp_path: Path, quantization: Any, modelopt: Any, kv_dtype: str, precision: str
) -> None:
    facts = model(
        tmp_path, CONFIG | ({"quantization_config": quantization} if quantization else {}), modelopt
    )
    assert (facts.dtype, facts.kv_dtype, facts.precision) == ("bfloat16", kv_dtype, precision)


def test_two_precisions_of_one_model_have_one_layout(tmp_path: Path) -> None:
    plain = model(tmp_path / "a", CONFIG)
    quantised = model(tmp_path / "b", CONFIG | {"quantization_config": {"quant_method": "fp8"}})
    assert plain.layout == quantised.layout != ""
    assert model(tmp_path / "c", CONFIG | {"num_key_value_heads": 8}).layout != plain.layout


def test_without_a_tokenizer_no_layout_is_known(tmp_path: Path) -> None:
    model(tmp_path, CONFIG)
    (tmp_path / "tokenizer.json").unlink()
    assert read_model_facts(tmp_path).layout == ""


@pytest.mark.parametrize(
    ("kind", "factor", "length"),
    [
        ("linear", 4.0, 16384),
        ("dynamic", 4.0, 16384),
        ("yarn", 4.0, 4096),
        ("llama3", 4.0, 4096),
        ("linear", float("inf"), None),
        ("linear", float("nan"), None),
    ],
)
def test_rope_scaling_multiplies_max_positions_as_in_tensorrt_llm(
    tmp_path: Path, kind: str, factor: float, length: int | None
) -> None:
    scaling = {"rope_scaling": {"type": kind, "factor": factor}}
    assert model(tmp_path, CONFIG | scaling).max_positions == length


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_model_without_a_readable_config_has_unknown_facts(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    for name in (tmp_path, "org/model", "~no_such_user/model"):
        assert read_model_facts(name) == UNKNOWN_MODEL


def test_facts_of_a_multimodal_model_are_those_of_its_text_config(tmp_path: Path) -> None:
    facts = model(tmp_path, {"architectures": ["X"], "text_config": CONFIG})
    assert (facts.dtype, facts.max_positions) == ("bfloat16", 4096)
