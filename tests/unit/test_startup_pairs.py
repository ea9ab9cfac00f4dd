"""Two workers that cannot work together are told why, before either serves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import Checkpoints
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.embedded.params.checkpoint import fingerprint
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.startup import ModelIdentity, describe_worker, require_fit, require_pair

ARGS: dict[str, Any] = {"kv_cache_config": {"dtype": "auto"}, "cache_transceiver_config": {"backend": "NIXL"}}


def described(
    role: str,
    args: dict[str, Any] | None = None,
    block_size: int = 32,
    weights: str = "ab",
    **config: Any,
) -> dict[str, Any]:
    settings = {"model": "org/model", "engine": "embedded", "role": Role(role)} | config
    worker = WorkerConfig(**settings)
    identity = ModelIdentity(worker.model_name, worker.model, weights)
    answer = describe_worker(worker, ARGS | (args or {}), block_size, identity)
    crossed: dict[str, Any] = json.loads(json.dumps(answer))
    return crossed


def test_a_worker_describes_what_has_to_be_equal() -> None:
    assert described("prefill", {"dtype": "float32"}, served_model_name="m") == {
        "role": "prefill",
        "strategy": "decode_first",
        "schedule_style": "context_first",
        "handoff_protocol": "dynamo",
        "prefill_dispatch": "direct",
        "engine": "embedded",
        "model": "m",
        "block_size": 32,
        "dtype": "float32",
        "kv_dtype": "auto",
        "transceiver": "NIXL",
        "source": "org/model",
        "weights": "ab",
        "ctx_info_endpoint": [],
    }


def test_nothing_said_is_the_default() -> None:
    config = WorkerConfig(model="m", engine="embedded", role=Role.AGG)
    answer = describe_worker(config, {"kv_cache_config": None}, 16, ModelIdentity("m", "m", "m"))
    assert (answer["dtype"], answer["kv_dtype"], answer["transceiver"]) == ("auto", "auto", None)


def test_a_pair_that_fits() -> None:
    require_pair(described("decode"), described("prefill"))
    require_pair(described("prefill"), described("decode"))


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ({"block_size": 16}, "kv_cache_config.tokens_per_block (--kv-block-size): decode 32, prefill 16"),
        ({"engine": "tensorrt_llm"}, "--engine: decode 'embedded', prefill 'tensorrt_llm'"),
        (
            {"strategy": "prefill_first"},
            "--disaggregation-strategy: decode 'decode_first', prefill 'prefill_first'",
        ),
        ({"prefill_dispatch": "queue"}, "--prefill-dispatch: decode 'direct', prefill 'queue'"),
        ({"served_model_name": "x"}, "--served-model-name: decode 'org/model', prefill 'x'"),
        ({"weights": "cd"}, "--model (hash of config.json and weights): decode 'ab', prefill 'cd'"),
        ({"args": {"dtype": "bfloat16"}}, "dtype: decode 'auto', prefill 'bfloat16'"),
        (
            {"args": {"kv_cache_config": {"dtype": "fp8"}}},
            "kv_cache_config.dtype: decode 'auto', prefill 'fp8'",
        ),
        (
            {"args": {"cache_transceiver_config": {"backend": "UCX"}}},
            "cache_transceiver_config.backend: decode 'NIXL', prefill 'UCX'",
        ),
    ],
)
def test_a_difference_names_the_setting_and_both_values(theirs: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_pair(described("decode"), described("prefill", **theirs))
    assert str(caught.value) == f"the two stages do not fit together; {named}"


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        require_pair(described("decode"), described("decode", block_size=8, engine="tensorrt_llm"))
    message = str(caught.value)
    assert "--disaggregation-mode: both workers are decode" in message
    assert message.count(";") == 3


@pytest.mark.parametrize("answer", [{}, {"token_ids": [1], "finish_reason": "stop"}])
def test_a_stranger_does_not_fit(answer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="prefill 'embedded', None None"):
        require_pair(described("prefill"), answer)


def test_every_worker_that_is_there_has_to_fit() -> None:
    decode, prefill = described("decode"), described("prefill", block_size=64)
    with pytest.raises(ConfigError, match="decode 32, prefill 64"):
        require_fit(decode, [described("prefill"), prefill])


@pytest.mark.parametrize(
    "other",
    [
        {"role": "agg"},
        {"role": "decode"},
        {"role": "prefill", "strategy": "prefill_first"},
        {"role": "prefill", "served_model_name": "another"},
    ],
)
def test_workers_of_other_deployments_may_be_as_they_like(other: dict[str, Any]) -> None:
    require_fit(described("decode"), [described(block_size=64, **other)])


def test_two_models_behind_one_name_do_not_fit(checkpoints: Checkpoints) -> None:
    one, other = (fingerprint(checkpoints(seed=seed)) for seed in (0, 1))
    assert one == fingerprint(checkpoints(seed=0))
    with pytest.raises(ConfigError, match=rf"--model \(hash .*\): decode '{one}', prefill '{other}'"):
        require_fit(described("decode", weights=one), [described("prefill", weights=other)])
