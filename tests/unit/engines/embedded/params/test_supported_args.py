"""What the embedded engine refuses by name, and what it only calls without effect."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

import trtllm_disagg.engines.embedded
from scripts.reference import arguments
from trtllm_disagg.engines.embedded.params.llm_args import (
    NO_EFFECT,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    LlmArgs,
    Served,
    refuse_unsupported,
)
from trtllm_disagg.errors import ConfigError

EMBEDDED = Path(trtllm_disagg.engines.embedded.__file__).parent


def llm_args(**values: Any) -> LlmArgs:
    return LlmArgs.model_validate({"model": "m", **values})


def test_an_argument_without_a_mark_is_read_by_the_engine() -> None:
    files = EMBEDDED.rglob("*.py")
    read = set(re.findall(r"\.(\w+)\b", "\n".join(file.read_text() for file in files)))
    unread = {
        key
        for key, field in arguments(LlmArgs)
        if not is_marked(field) and not has_fields(field) and key.rpartition(".")[2] not in read
    }
    assert unread == set()


def is_marked(field: FieldInfo) -> bool:
    return any(mark is NO_EFFECT or isinstance(mark, Served) for mark in field.metadata)


def has_fields(field: FieldInfo) -> bool:
    kinds = (field.annotation, *get_args(field.annotation))
    return any(inspect.isclass(kind) and issubclass(kind, BaseModel) for kind in kinds)


def test_a_tokenizer_revision_needs_a_tokenizer_on_the_hub(tmp_path: Path) -> None:
    for tokenizer in (None, str(tmp_path)):
        with pytest.raises(ConfigError, match="tokenizer_revision: 'v2' is not allowed"):
            refuse_unsupported(llm_args(tokenizer=tokenizer, tokenizer_revision="v2"))
    assert refuse_unsupported(llm_args(tokenizer="acme/tiny", tokenizer_revision="v2")) == []


def test_default_engine_arguments_are_not_refused() -> None:
    assert refuse_unsupported(llm_args()) == []


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"context_parallel_size": 2}, "context_parallel_size"),
        ({"moe_expert_parallel_size": 2}, "moe_expert_parallel_size"),
        ({"speculative_config": {"decoding_type": "MTP"}}, "speculative_config"),
        ({"sparse_attention_config": {"algorithm": "rocket"}}, "sparse_attention_config"),
        ({"enable_lora": True}, "enable_lora"),
        ({"lora_config": {}}, "lora_config"),
        ({"max_beam_width": 2}, "max_beam_width"),
        ({"load_format": "dummy"}, "load_format"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
        ({"generation_config": "auto"}, "generation_config"),
        ({"kv_cache_config": {"dtype": "FP8"}}, "kv_cache_config.dtype"),
        ({"kv_cache_config": {"host_cache_size": 1}}, "kv_cache_config.host_cache_size"),
        ({"kv_cache_config": {"disk_cache_size": 1}}, "kv_cache_config.disk_cache_size"),
        ({"kv_cache_config": {"max_attention_window": [64]}}, "kv_cache_config.max_attention_window"),
        ({"kv_cache_config": {"kv_events_config": {"enable_kv_cache_events": True}}}, "kv_events_config"),
        ({"cache_transceiver_config": {"backend": "UCX"}}, "cache_transceiver_config.backend"),
    ],
)
def test_argument_that_would_change_answers_is_refused_by_name(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unsupported(llm_args(**values))
    assert key in str(caught.value)
    assert "on the embedded engine" in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"moe_expert_parallel_size": 1},
        {"cache_transceiver_config": {"backend": "SHARED_MEMORY"}},
        {"cache_transceiver_config": {"backend": "DEFAULT"}},
        {"scheduler_config": {"dynamic_batch_config": {}}},
        *({"scheduler_config": {"context_chunking_policy": name}} for name in ContextChunkingPolicy),
        *({"scheduler_config": {"capacity_scheduler_policy": name}} for name in CapacitySchedulerPolicy),
        {"kv_cache_config": {"enable_partial_reuse": False, "max_util_for_resume": 0.5}},
        {"dtype": "float32", "kv_cache_config": {"dtype": "float32"}},
        {"embedded": {"num_threads": 2, "cpu_affinity": [0, 1], "device": "cpu"}},
    ],
)
def test_supported_engine_arguments_are_accepted(values: dict[str, Any]) -> None:
    assert refuse_unsupported(llm_args(**values)) == []


def test_kv_cache_dtype_other_than_the_models_is_refused() -> None:
    kv_config = {"dtype": "bfloat16"}
    assert refuse_unsupported(llm_args(dtype="bfloat16", kv_cache_config=kv_config)) == []
    with pytest.raises(ConfigError, match="auto or float32"):
        refuse_unsupported(llm_args(dtype="float32", kv_cache_config=kv_config))


def test_gpu_tuning_arguments_are_accepted_with_a_note() -> None:
    args = llm_args(
        cuda_graph_config=None,
        disable_overlap_scheduler=True,
        moe_config={"backend": "CUTLASS"},
        kv_cache_config={"use_uvm": True},
        cache_transceiver_config={"backend": "NIXL", "max_tokens_in_buffer": 4},
        scheduler_config={"dynamic_batch_config": {"enable_batch_size_tuning": False}},
    )
    assert refuse_unsupported(args) == [
        "kv_cache_config.use_uvm",
        "scheduler_config.dynamic_batch_config.enable_batch_size_tuning",
        "cache_transceiver_config.max_tokens_in_buffer",
        "disable_overlap_scheduler",
        "cuda_graph_config",
        "moe_config",
    ]


def test_the_arguments_survive_json() -> None:
    args = llm_args(cache_transceiver_config={"backend": "NIXL"})
    assert LlmArgs.model_validate(args.model_dump(mode="json")) == args


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"kv_cache_config": {"event_buffer_max_size": 10**20}}, "event_buffer_max_size"),
        ({"max_stats_len": 10**20}, "max_stats_len"),
        ({"embedded": {"num_threads": 100_000}}, "num_threads"),
    ],
)
def test_numbers_out_of_range_are_refused(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        llm_args(**values)


@pytest.mark.parametrize("cpu", [-1, 9999])
def test_cpu_affinity_with_missing_processors_is_refused(cpu: int) -> None:
    with pytest.raises(ConfigError, match=rf"embedded\.cpu_affinity: \[{cpu}\] is not allowed"):
        refuse_unsupported(llm_args(embedded={"cpu_affinity": [0, cpu]}))
