"""The flags of this worker beside those of the installed `python -m dynamo.trtllm`, one by one.

When this fails after an upgrade of ai-dynamo, the flag that it names is new, gone or changed: add it to WorkerConfig or
to `config/dynamo_flags.py`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.deployments import ROOT
from tests.support.worker_args import parse_worker_args
from trtllm_disagg.common.cli import actions_of
from trtllm_disagg.config.dynamo_flags import (
    NOT_SERVED,
    OF_THE_ROUTER,
    OF_THE_RUNTIME,
    ROUTER_SWITCHES,
    VARIABLES_NOT_SERVED,
    names_of_switch,
)
from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.config.worker_config import SETTINGS, WorkerConfig
from trtllm_disagg.engines.embedded.params.llm_args import BaseLlmArgs
from trtllm_disagg.errors import ConfigError

pytest.importorskip("dynamo.trtllm._version")


@dataclass(frozen=True)
class Upstream:
    """One flag of Dynamo's."""

    names: tuple[str, ...]
    variable: str | None
    default: Any
    choices: tuple[str, ...]
    is_switch: bool

    @property
    def name(self) -> str:
        return self.names[0]


@pytest.fixture(scope="module")
def upstream() -> Iterator[dict[str, Upstream]]:
    """Every flag that its parser has, the router's too."""
    patch = pytest.MonkeyPatch()
    for name in [name for name in os.environ if name.startswith(("DYN_", "NATS_TLS_"))]:
        patch.delenv(name)
    # All that its module of flags asks of TensorRT-LLM.
    for name in ("tensorrt_llm", "tensorrt_llm.llmapi", "tensorrt_llm.llmapi.llm_args"):
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["tensorrt_llm.llmapi.llm_args"].BaseLlmArgs = BaseLlmArgs  # type: ignore[attr-defined]
    utils = importlib.import_module("dynamo.common.configuration.utils")
    variables: dict[str, str] = {}
    add = utils.add_argument

    def noting(parser: Any, *, flag_name: str, env_var: str, **more: Any) -> None:
        variables[flag_name] = env_var
        add(parser, flag_name=flag_name, env_var=env_var, **more)

    try:
        groups = [
            importlib.import_module(f"dynamo.common.configuration.groups.{name}")
            for name in ("runtime_args", "router_args", "kv_router_args", "frontend_decoding_args")
        ]
        backend = importlib.import_module("dynamo.trtllm.backend_args")
        for module in (utils, *groups, backend):
            if hasattr(module, "add_argument"):
                patch.setattr(module, "add_argument", noting)
        parser = argparse.ArgumentParser()
        groups[0].DynamoRuntimeArgGroup().add_arguments(parser)
        backend.DynamoTrtllmArgGroup().add_arguments(parser)
        groups[1].add_worker_router_arguments(parser)
        yield {flag.name: flag for flag in (_of(action, variables) for action in actions_of(parser))}
    finally:
        patch.undo()
        for name in [name for name in sys.modules if name.startswith("dynamo.trtllm")]:
            del sys.modules[name]


def _of(action: argparse.Action, variables: dict[str, str]) -> Upstream:
    # What `add_argument` did not see reads its variable by the usual name.
    usual = (
        "DYN_" + action.option_strings[0].removeprefix("--dyn-").removeprefix("--").replace("-", "_").upper()
    )
    return Upstream(
        tuple(action.option_strings),
        variables.get(action.option_strings[0], usual),
        action.default,
        tuple(action.choices or ()),
        action.nargs == 0 and any(name.startswith("--no-") for name in action.option_strings),
    )


#: Of flags that both have: what is another here, and why. `trtllm-disagg worker --help` has the values.
DIFFERENCES = {
    "--model": "required: no model is served that was not asked for",
    "--endpoint": "both roles of a pair have a place for frontends and one for each other",
    "--discovery-backend": "file, unless ETCD_ENDPOINTS is set: one machine needs no etcd",
    "--event-plane": "zmq is named; Dynamo takes it when none is",
    "--load-format": "the formats that TensorRT-LLM has for text; without gms: its memory service is not set up",
    "--disaggregation-mode": "without encode, which is for images; prefill_and_decode is another name of agg",
    "--modality": "without those of diffusion",
    "--dyn-tool-call-parser": "checked against Dynamo's list when the worker starts",
    "--dyn-reasoning-parser": "checked against Dynamo's list when the worker starts",
    "--dyn-structural-tag": "off unless guided_decoding_backend is set, without which the engine refuses tags",
}

OURS = {flag.names[0]: flag for flag in SETTINGS.values()}
REFUSED = {flag.name: flag for flag in NOT_SERVED}
#: argparse has the one; `--version` prints another program's.
BY_ITSELF = {"-h", "--version"}
PLACES: list[set[str]] = [
    set(OURS),
    set(REFUSED),
    set(OF_THE_RUNTIME),
    {*OF_THE_ROUTER, *ROUTER_SWITCHES},
    BY_ITSELF,
]


def test_every_dynamo_flag_is_in_exactly_one_table(upstream: dict[str, Upstream]) -> None:
    places = {name: [place for place in PLACES if name in place] for name in upstream}
    assert {name for name, found in places.items() if len(found) != 1} == set()


def test_every_other_name_of_a_flag_is_known_too(upstream: dict[str, Upstream]) -> None:
    known = {name for flag in SETTINGS.values() for name in flag.names}
    known |= {*REFUSED, *OF_THE_RUNTIME, *OF_THE_ROUTER, *ROUTER_SWITCHES, *BY_ITSELF, "--help"}
    known |= {names_of_switch(name)[1] for name in known}
    assert {name for flag in upstream.values() for name in flag.names} - known == set()


def test_no_table_has_a_flag_that_dynamo_lacks(upstream: dict[str, Upstream]) -> None:
    names = {name for flag in upstream.values() for name in flag.names}
    assert {*REFUSED, *OF_THE_RUNTIME, *OF_THE_ROUTER, *ROUTER_SWITCHES, *DIFFERENCES} - names == set()


def test_variables_have_dynamos_names(upstream: dict[str, Upstream]) -> None:
    assert {name: flag.variable for name, flag in REFUSED.items()} == {
        name: upstream[name].variable for name in REFUSED
    }
    assert {name: variable for name, (variable, _) in OF_THE_RUNTIME.items()} == {
        name: upstream[name].variable for name in OF_THE_RUNTIME
    }
    shared = OURS.keys() & upstream.keys()
    assert [name for name in shared if upstream[name].variable not in OURS[name].variables] == []


def test_switches_of_dynamos_worker_are_switches_here(upstream: dict[str, Upstream]) -> None:
    switches = {name for name, flag in upstream.items() if flag.is_switch}
    ours = {
        name for name, flag in OURS.items() if isinstance(SETTINGS[flag.name].default, bool)
    } & upstream.keys()
    ours |= {name for name, flag in REFUSED.items() if flag.is_switch}
    ours |= {name for name, (_, is_switch) in OF_THE_RUNTIME.items() if is_switch}
    assert switches == ours | (set(ROUTER_SWITCHES) & upstream.keys())


def test_flags_differ_from_dynamos_only_as_the_table_of_differences_has_it(
    upstream: dict[str, Upstream],
) -> None:
    different = set()
    for name in OURS.keys() & upstream.keys():
        field, theirs = OURS[name].name, upstream[name]
        allowed = SETTINGS[field].allowed
        same_choices = set(theirs.choices) == set(allowed.choices if allowed else ())
        if not same_choices or SETTINGS[field].default != theirs.default:
            different.add(name)
    explained = set(DIFFERENCES) - {"--endpoint", "--dyn-structural-tag"}
    # Their defaults are not values of the flag: the places follow from the role, the tag from the engine.
    assert different == explained


def test_spelled_out_defaults_of_unserved_dynamo_flags_are_accepted(upstream: dict[str, Upstream]) -> None:
    """Manifests spell out defaults."""
    defaults = {name: _text(upstream[name].default) for name in REFUSED}
    parse(**{str(upstream[name].variable): text for name, text in defaults.items()})
    for name, text in defaults.items():
        if text and not REFUSED[name].is_switch:
            parse(name, text)


def _text(default: Any) -> str:
    if default is None:
        return ""
    return " ".join(default) if isinstance(default, list) else str(default)


# -- what becomes of them


def parse(*argv: str, **environ: str) -> WorkerConfig:
    return parse_worker_args(["--model", "m", *argv], environ)


@pytest.mark.parametrize("flag", NOT_SERVED, ids=lambda flag: str(flag.name))
def test_unserved_dynamo_option_is_refused_as_flag_and_as_variable(flag: Any) -> None:
    asks = names_of_switch(flag.name) if flag.is_switch else (flag.name,)
    wanted = "no" if "true" in flag.accepted else "1"
    argv = [asks["true" in flag.accepted]] if flag.is_switch else [flag.name, "xyz"]
    with pytest.raises(ConfigError, match=f"^{flag.name}: ") as caught:
        parse(*argv)
    assert str(caught.value).endswith("docs/reference/from-dynamo-trtllm.md says why, and what to use)")
    with pytest.raises(ConfigError, match=f"^{flag.variable}: "):
        parse(**{str(flag.variable): wanted if flag.is_switch else "xyz"})


def test_the_page_has_the_reason_of_every_refused_flag_and_variable() -> None:
    page = (ROOT / "docs" / "reference" / "from-dynamo-trtllm.md").read_text(encoding="utf-8")
    reasons = page.partition("\n## Refused\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w-]+)", reasons))
    assert {flag.name for flag in (*NOT_SERVED, *VARIABLES_NOT_SERVED)} - named == set()


@pytest.mark.parametrize("variable", VARIABLES_NOT_SERVED, ids=lambda variable: str(variable.name))
def test_a_variable_without_a_flag_is_refused_too(variable: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{variable.name}: '1' .*from-dynamo-trtllm.md"):
        parse(**{variable.name: "1"})
    for value in variable.accepted:
        parse(**{variable.name: value})


#: Read by this worker, by Dynamo's runtime or by TensorRT-LLM, however they are started.
READ = {
    "DYN_CONNECTOR",
    "DYN_FORWARDPASS_METRIC_PORT",
    "DYN_KV_TRANSFER_DOMAIN",
    "DYN_KV_TRANSFER_ENFORCEMENT",
    "DYN_KV_TRANSFER_PREFERRED_WEIGHT",
    "DYN_SYSTEM_PORT",
    "DYN_TOPOLOGY_ENABLED",
    "DYN_TOPOLOGY_MOUNT_PATH",
    "TLLM_KV_CACHE_MANAGER_V2_BACKEND",
}
#: Of requests with images, which are refused one by one.
FOR_MEDIA = {"DYN_MM_ALLOW_INTERNAL"}


def test_every_variable_that_dynamos_worker_names_is_known(upstream: dict[str, Upstream]) -> None:
    """What it reads besides those of its flags: a new one is to be served, or refused by name."""
    root = Path(next(iter(importlib.import_module("dynamo").__path__)))
    sources = [path for path in (root / "trtllm").rglob("*.py") if "tests" not in path.parts]
    sources += [root / "common" / "engine_monitor.py", root / "common" / "utils" / "topology.py"]
    named = {
        name
        for path in sources
        for name in re.findall(r"""["']((?:DYN|TRTLLM|TLLM)_[A-Z0-9_]+)["']""", path.read_text())
    }
    of_flags = {variable for flag in SETTINGS.values() for variable in flag.variables}
    of_flags |= {flag.variable for flag in (*NOT_SERVED, *VARIABLES_NOT_SERVED) if flag.variable}
    assert named - of_flags - READ - FOR_MEDIA == set()
    assert len(named) > 50


@pytest.mark.parametrize(
    ("flag", "variable", "value"),
    [
        ("--response-plane", "DYN_RESPONSE_PLANE", "udp"),
        ("--engine-request-limit", "DYN_ENGINE_REQUEST_LIMIT", "0"),
        ("--engine-request-limit", "DYN_ENGINE_REQUEST_LIMIT", "many"),
        ("--tcp-tls-handshake-timeout", "DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS", "-1"),
    ],
)
def test_a_value_that_dynamos_runtime_cannot_use_is_refused_by_its_flag_and_its_variable(
    flag: str, variable: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: '{value}' is not allowed; expected "):
        parse(flag, value)
    with pytest.raises(ConfigError, match=f"^{variable}: '{value}' is not allowed; expected "):
        parse(**{variable: value})
    parse(**{variable: ""})


def test_values_that_dynamos_runtime_and_router_can_use_are_kept() -> None:
    parse("--response-plane", "quic", "--engine-request-limit", "8", "--tcp-tls-handshake-timeout", "3")
    flags = ("--router-mode", "kv", "--no-router-track-active-blocks", "--router-temperature", "0.5")
    assert parse(*flags).router_flags == flags
    assert parse().router_flags == ()


BLOCK = "--trtllm.kv_cache_config.tokens_per_block"


def test_engine_arguments_as_flags_are_an_override() -> None:
    config = parse(
        *("--trtllm.kv_cache_config.dtype", "fp8", "--trtllm.max_batch_size=8", "--max-seq-len", "64"),
        *(
            "--trtllm.kv_cache_config.free_gpu_memory_fraction",
            "0.5",
            "--trtllm.enable_chunked_prefill",
            "True",
        ),
        *("--trtllm.cuda_graph_config", "none"),
    )
    assert config.max_seq_len == 64
    assert config.override_engine_args == (
        '{"kv_cache_config": {"dtype": "fp8", "free_gpu_memory_fraction": 0.5}, "max_batch_size": 8, '
        '"enable_chunked_prefill": true, "cuda_graph_config": null}'
    )


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--trtllm.a"], "--trtllm.a needs a value"),
        (["--trtllm.a", "--max-seq-len", "3"], "--trtllm.a needs a value"),
        (["--trtllm.a..b", "1"], "--trtllm.a..b has an empty part"),
        (["--trtllm.a", "1", "--trtllm.a.b", "2"], "--trtllm.a.b: a has a value already"),
        (["--trtllm.a", "1", "--override-engine-args", "{}"], "exclude each other"),
        (["--trtllm.kv_cache_config", "5"], "--trtllm.kv_cache_config: 5 "),
        (["--trtllm.kv_cache_config.dtipe=fp8"], "--trtllm.kv_cache_config.dtipe: "),
        ([BLOCK, "8", "--kv-block-size", "16"], f"{BLOCK}: 8 is not allowed; expected 16"),
        (["--override-engine-args", '{"kv_cache_config": 5}'], "--override-engine-args: kv_cache_config: 5 "),
    ],
)
def test_an_engine_argument_that_is_unreadable_or_wrong_is_named_as_it_was_given(
    argv: list[str], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_engine_args(parse("--engine", "embedded", *argv))
    assert named in str(caught.value)


def test_structural_tag_flag_without_a_value_is_true() -> None:
    assert parse("--dyn-structural-tag", "--max-seq-len", "9").structural_tag == "true"
    assert parse("--dyn-structural-tag", "false").structural_tag == "false"
    assert parse().structural_tag is None
