"""What LLM(...) of the modelled engine refuses before anything is built, and without its tables."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.modelled_cores import MEASURED, ModelledTestCore, model_directory
from trtllm_disagg.engines.modelled import LLM, build
from trtllm_disagg.engines.modelled.config import ModelledArgs, ModelledConfig
from trtllm_disagg.errors import ConfigError


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"modelled": {"sytem": "h100_sxm"}}, r"modelled\.sytem: .* no such key.*system"),
        ({"modelled": {"time_scale": 0.05}}, r"modelled\.time_scale: 0\.05 is not allowed; .*or equal to 0\.1"),
        ({"modelled": {"measured": {"step_ms": -1}}}, r"modelled\.measured\.step_ms: -1 is not allowed"),
        ({"pipeline_parallel_size": 2}, r"pipeline_parallel_size: 2 is not allowed; .*on the modelled engine"),
        ({"guided_decoding_backend": "llguidance"}, r"guided_decoding_backend: .*no model follows a grammar"),
        ({"embedded": {"num_threads": 2}}, r"embedded: .* expected no value, on the modelled engine"),
        ({"model": "/nowhere/at/all"}, r"model: '/nowhere/at/all' is not allowed; .*config\.json"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(**({"model": model_directory()} | args))


@pytest.mark.parametrize("own", [{}, {"measured": MEASURED, "model": "llama-3.1-8b"}])
def test_without_the_tables_the_way_to_them_is_named(
    own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PACKAGE", "no_such_package")
    args = ModelledArgs(model=model_directory(), modelled=ModelledConfig(**own))
    with pytest.raises(ConfigError, match=r"pip install 'trtllm-disagg\[modelled\]'"):
        build.build_core(args, lambda: None, ModelledTestCore().clock)


def test_a_sequence_is_no_longer_than_the_modelled_models() -> None:
    with pytest.raises(ConfigError, match=r"max_seq_len: 4096 is not allowed; expected at most .*2048"):
        ModelledTestCore(max_seq_len=4096)


def test_a_pool_without_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_tokens: 16 is not allowed; .* 32"):
        ModelledTestCore(kv_cache_config={"max_tokens": 16})
