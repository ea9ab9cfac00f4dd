"""What a model card says beyond the engine, as Dynamo's own code reads it."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dynamo.common.configuration.groups import runtime_args
from dynamo.common.configuration.groups.runtime_args import StructuralTagConfig
from dynamo.llm import ModelRuntimeConfig

from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.dynamo_runtime.advertised import Advertised
from trtllm_disagg.errors import ConfigError


def advertised(*, guides: bool = False, speculative_config: object = None, **settings: Any) -> Advertised:
    backend = "xgrammar" if guides else None
    engine_args = {"guided_decoding_backend": backend, "speculative_config": speculative_config}
    return Advertised.of(WorkerConfig(model="m", **settings), engine_args)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_ROUTER_MODE", "DYN_TOPOLOGY_ENABLED"):
        monkeypatch.delenv(name, raising=False)


def test_a_tag_is_dynamos_default_where_the_engine_can_keep_to_it() -> None:
    assert advertised(guides=True).structural_tag == msgspec.to_builtins(StructuralTagConfig())


@pytest.mark.parametrize(
    ("flag", "backend", "scope"),
    [
        (None, None, None),
        (None, "llguidance", None),
        ("false", "xgrammar", None),
        ("true", None, "always"),
        ('{"scope": "auto"}', "xgrammar", "auto"),
    ],
)
def test_structural_tag_scope_follows_flag_and_backend(
    flag: str | None, backend: str | None, scope: str | None
) -> None:
    config = WorkerConfig(model="m", structural_tag=flag)
    tag = Advertised.of(config, {"guided_decoding_backend": backend}).structural_tag
    assert (tag or {}).get("scope") == scope


@pytest.mark.parametrize("told", ["perhaps", '{"scope": "never"}', '{"scop": "auto"}', "[]"])
def test_a_tag_that_dynamo_would_not_read_is_refused(told: str) -> None:
    with pytest.raises(ConfigError, match="--dyn-structural-tag: "):
        advertised(structural_tag=told)


@pytest.mark.parametrize(
    ("field", "flag"), [("tool_call_parser", "tool-call-parser"), ("reasoning_parser", "reasoning-parser")]
)
def test_a_parser_that_dynamo_lacks_is_refused_with_the_nearest(field: str, flag: str) -> None:
    known: dict[str, Any] = {field: "qwen3_coder" if "tool" in field else "qwen3"}
    assert getattr(advertised(**known), field)
    unknown: dict[str, Any] = {field: "deepseek_v33"}
    with pytest.raises(ConfigError, match=rf"--dyn-{flag}: 'deepseek_v33' .*deepseek_v3"):
        advertised(**unknown)


def test_router_config_is_advertised_only_with_router_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advertised(router_flags=("--router-mode", "kv", "--no-router-track-active-blocks")).router
    assert advertised().router is None
    monkeypatch.setenv("DYN_ROUTER_MODE", "kv")
    assert advertised().router is not None


def test_a_router_flag_that_dynamo_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--router-mode fast: .*invalid choice: 'fast'"):
        advertised(router_flags=("--router-mode", "fast"))


def test_model_card_has_parsers_thinking_mode_structural_tag_and_tools_flag() -> None:
    for excludes in (True, False):
        card = ModelRuntimeConfig()
        advertised(
            guides=True,
            tool_call_parser="hermes",
            reasoning_parser="qwen3",
            default_thinking_mode="disabled",
            exclude_tools_when_tool_choice_none=excludes,
        ).put_on(card)
        assert (card.tool_call_parser, card.reasoning_parser) == ("hermes", "qwen3")
        assert card.get_engine_specific("default_thinking_mode") == "disabled"
        assert card.structural_tag["scope"] == "always"
        assert card.exclude_tools_when_tool_choice_none is excludes


def test_model_card_without_flags_has_no_parsers_no_tag_and_no_topology() -> None:
    card = ModelRuntimeConfig()
    advertised().put_on(card)
    assert (card.tool_call_parser, card.reasoning_parser, card.structural_tag) == (None, None, None)
    assert not card.topology_domains
    assert card.kv_transfer_domain is None


@pytest.mark.parametrize(("installed", "why"), [("0.2.3", ""), ("0.1.32", "0.1.32"), (None, "xgrammar")])
def test_arguments_in_any_order_are_refused_where_the_grammars_cannot_have_them(
    installed: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(runtime_args, "distribution_version", version)
    tag = '{"tool_arguments_any_order": true}'
    if not why:
        assert (advertised(structural_tag=tag).structural_tag or {})["tool_arguments_any_order"] is True
        return
    with pytest.raises(ConfigError, match=f"--dyn-structural-tag: .*{why}"):
        advertised(structural_tag=tag)


@pytest.mark.parametrize(
    ("given", "nextn"),
    [
        ({"decoding_type": "MTP", "max_draft_len": None, "num_nextn_predict_layers": 2}, 2),
        ({"decoding_type": "MTP", "num_nextn_predict_layers": 3}, 3),
        ({"max_draft_len": 4}, 4),
        ({"decoding_type": "MTP"}, None),
        ({"max_draft_len": "four"}, None),
        ("MTP", None),
        (None, None),
    ],
    ids=["null-length", "mtp", "drafter", "no-number", "wrong-number", "no-keys", "none"],
)
def test_model_card_says_how_many_tokens_a_step_drafts(given: Any, nextn: int | None) -> None:
    card = ModelRuntimeConfig()
    advertised(speculative_config=given).put_on(card)
    shown = json.loads(card.runtime_data.get("spec_decode", "null"))
    if nextn is None:
        assert shown is None
    else:
        method = {"method": "MTP"} if "decoding_type" in given else {}
        assert shown == {"nextn": nextn, "source": "backend_config"} | method


@pytest.fixture
def topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As Dynamo's operator mounts it."""
    for name, value in (("zone", "z1"), ("rack", "r7")):
        (tmp_path / name).write_text(value)
    monkeypatch.setenv("DYN_TOPOLOGY_ENABLED", "true")
    monkeypatch.setenv("DYN_TOPOLOGY_MOUNT_PATH", str(tmp_path))
    monkeypatch.setenv("DYN_KV_TRANSFER_DOMAIN", "zone")
    return tmp_path


def test_a_topology_is_on_the_card(topology: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KV_TRANSFER_ENFORCEMENT", "preferred")
    monkeypatch.setenv("DYN_KV_TRANSFER_PREFERRED_WEIGHT", "0.5")
    card = ModelRuntimeConfig()
    advertised(role="decode", strategy="router").put_on(card)
    assert card.topology_domains == {"zone": "z1", "rack": "r7"}
    assert (card.kv_transfer_domain, card.kv_transfer_enforcement) == ("zone", "preferred")
    assert card.kv_transfer_preferred_weight == 0.5


@pytest.mark.parametrize(
    ("variable", "value", "strategy", "named"),
    [
        ("DYN_KV_TRANSFER_DOMAIN", "zone", "decode_first", "DYN_TOPOLOGY_ENABLED: .* router "),
        ("DYN_KV_TRANSFER_DOMAIN", "", "router", "DYN_TOPOLOGY_ENABLED: 'true' .*DYN_KV_TRANSFER_DOMAIN"),
        ("DYN_KV_TRANSFER_PREFERRED_WEIGHT", "much", "router", "DYN_KV_TRANSFER_PREFERRED_WEIGHT: .*much"),
    ],
)
def test_an_incomplete_topology_or_one_without_the_router_is_refused(
    variable: str, value: str, strategy: str, named: str, topology: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=named):
        advertised(role="decode", strategy=strategy)
