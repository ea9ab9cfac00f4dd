"""The tables: step times are theirs, static batches are near their own estimate, and what they lack is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.modelled_cores import ModelledTestCore, model_directory, prompt_of
from trtllm_disagg.engines.modelled.config import MODELS, ModelledArgs
from trtllm_disagg.engines.modelled.step_times import Chunk
from trtllm_disagg.engines.modelled.tables import open_tables
from trtllm_disagg.errors import ConfigError

sdk: Any = pytest.importorskip(
    "aiconfigurator_core.sdk", reason="pip install 'trtllm-disagg[modelled]', which is 80 MB of tables"
)

#: On which GPUs, and how many, `MODELS` are shown to be covered.
_FOUR, _EIGHT = ({"tensor_parallel_size": n, "moe_expert_parallel_size": n} for n in (4, 8))
COVERED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": ("l40s", {}),
    "llama-3.1-70b": ("h100_sxm", {"tensor_parallel_size": 4}),
    "llama-3.1-70b-fp8": ("h200_sxm", {"tensor_parallel_size": 2}),
    "llama-3.3-70b": ("h100_sxm", {"tensor_parallel_size": 4}),
    "llama-3.3-70b-fp8": ("h200_sxm", {"tensor_parallel_size": 2}),
    "qwen3-32b": ("gb200", {"tensor_parallel_size": 2}),
    "qwen3-32b-fp8": ("h200_sxm", {"tensor_parallel_size": 2}),
    "qwen3-235b-a22b": ("b200_sxm", _EIGHT),
    "qwen3-235b-a22b-fp8": ("h200_sxm", _FOUR | {"enable_attention_dp": True}),
    "gpt-oss-120b": ("b200_sxm", {"tensor_parallel_size": 2, "moe_expert_parallel_size": 2}),
    "deepseek-r1": ("h200_sxm", _EIGHT | {"modelled": {"attention_dtype": "bfloat16"}}),
}


def args_of(model: str | None = "llama-3.1-8b", system: str = "h100_sxm", **more: Any) -> ModelledArgs:
    own = {"model": model, "system": system} | more.pop("modelled", {})
    given = {"model": more.pop("directory", model_directory()), "max_batch_size": 64, "modelled": own}
    return ModelledArgs(**(given | more))


@pytest.fixture(scope="module")
def handle() -> Any:
    return sdk.EngineHandle.compile(
        MODELS["llama-3.1-8b"], "h100_sxm", "trtllm", backend_version="1.3.0rc20", tp_size=1
    )


def test_step_of_one_chunk_or_decode_alone_takes_the_tables_time(handle: Any) -> None:
    tables, _ = open_tables(args_of())
    for tokens, before in ((1, 0), (513, 0), (8192, 0), (2048, 6144), (32, 9000)):
        expected = handle.predict_prefill_latency(1, before + tokens, before)
        assert sum(tables.parts([Chunk(tokens, before)], 0, 0)) == pytest.approx(expected, rel=1e-9)
    for count, context in ((1, 1), (8, 1000), (32, 2048), (64, 8191)):
        expected = handle.predict_decode_latency(count, context)
        assert sum(tables.parts([], count, context)) == pytest.approx(expected, rel=1e-3)


def test_a_mixed_step_lies_between_its_largest_part_and_their_sum(handle: Any) -> None:
    tables, _ = open_tables(args_of())
    mixed = sum(tables.parts([Chunk(2048, 6144)], 32, 2048))
    prefill, decode = handle.predict_prefill_latency(1, 8192, 6144), handle.predict_decode_latency(32, 2048)
    assert max(prefill, decode) < mixed < prefill + decode


@pytest.mark.parametrize(
    ("batch", "prompt", "answer"), [(1, 4000, 32), (8, 1024, 64), (32, 256, 128), (16, 512, 16)]
)
def test_static_batch_takes_the_time_of_the_tables_estimate(
    handle: Any, batch: int, prompt: int, answer: int
) -> None:
    core = ModelledTestCore(
        modelled={"measured": None, "model": "llama-3.1-8b"},
        max_seq_len=8192,
        max_batch_size=64,
        max_num_tokens=8192,
        kv_cache_config={},
    )
    begun = core.clock.now()
    # No two begin alike.
    ids = [core.add([salt + 1, *prompt_of(prompt - 1, salt)], answer) for salt in range(batch)]
    core.run(*ids)
    _, _, expected = handle.run_static(batch_size=batch, isl=prompt, osl=answer)
    assert 1000 * (core.clock.now() - begun) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_has_tables(name: str) -> None:
    system, more = COVERED[name]
    tables, facts = open_tables(args_of(name, system, **more))
    assert 1 < sum(tables.parts([Chunk(1024, 0)], 0, 0)) < 1000
    assert facts.kv_blocks > 500
    assert facts.kv_bytes_per_token > 5000
    assert facts.link_bytes_per_second >= 50e9


def test_the_model_may_be_that_of_the_directory(tmp_path: Any) -> None:
    config = sdk.__file__.replace("sdk/__init__.py", "model_configs/Qwen--Qwen3-8B_config.json")
    with open(config) as source:
        (tmp_path / "config.json").write_text(source.read())
    by_directory, _ = open_tables(args_of(None, directory=tmp_path))
    by_name, _ = open_tables(args_of("Qwen/Qwen3-8B"))
    assert by_directory.parts([Chunk(1000, 0)], 4, 100) == by_name.parts([Chunk(1000, 0)], 4, 100)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"model": "gpt-7"}, r"modelled\.model: 'gpt-7' is not allowed; expected .*llama-3\.1-8b"),
        ({"system": "h1000"}, r"modelled\.system: 'h1000' is not allowed; expected one of .*h100_sxm, h200_sxm"),
        ({"modelled": {"backend_version": "0.1"}},
         r"no table has llama-3\.1-8b on h100_sxm .*TensorRT-LLM 1\.3\.0rc20"),
        ({"model": "deepseek-r1", "system": "h200_sxm", "tensor_parallel_size": 8, "moe_expert_parallel_size": 8},
         r"no table has deepseek-r1 .*MLA.*modelled\.attention_dtype"),
        ({"max_num_tokens": 65536}, r"max_num_tokens: 65536 is not allowed; expected at most 32768"),
        ({"max_batch_size": 4096}, r"max_batch_size: 4096 is not allowed; expected at most 2048"),
        ({"tensor_parallel_size": 4, "moe_expert_parallel_size": 3}, r"moe_expert_parallel_size: 3 is not allowed"),
        ({"tensor_parallel_size": 4, "moe_tensor_parallel_size": 3}, r"moe_tensor_parallel_size: 3 is not allowed"),
        ({"tensor_parallel_size": 4, "moe_expert_parallel_size": 4, "moe_tensor_parallel_size": 2},
         r"moe_expert_parallel_size x moe_tensor_parallel_size: 8 is not allowed; expected tensor_parallel_size 4"),
    ],
)  # fmt: skip
def test_model_or_gpu_without_a_table_is_refused_by_name(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_tables(args_of(**args))
