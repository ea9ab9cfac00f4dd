"""The command line and the environment of a worker."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker_args import parse_worker_args
from trtllm_disagg.config.args import WHEREABOUTS, whereabouts_of
from trtllm_disagg.config.dynamo_flags import names_of_switch
from trtllm_disagg.config.settings import names_of_endpoint_types
from trtllm_disagg.config.worker_config import ORCHESTRATION, SETTINGS, Role, WorkerConfig, flag_of
from trtllm_disagg.errors import ConfigError


def parse(*argv: str, **environ: str) -> WorkerConfig:
    return parse_worker_args(["--model", "m", *argv], environ)


#: One value of each setting that differs from its default, where other_value() knows none.
OTHER_VALUES: dict[str, Any] = {
    "model": "org/model",
    "served_model_name": "name",
    "namespace": "ns",
    "endpoint": "dyn://dynamo.c.e",
    "kv_state_endpoint": "dynamo/cache/updates",
    "next_endpoint": "dyn://dynamo.c.n",
    "extra_engine_args": "a.yaml",
    "override_engine_args": "{}",
    "revision": "refs/pr/3",
    "worker_revision": "v2",
    "health_check_payload": '{"token_ids": [5]}',
    "engine_stall_timeout": 70.0,
    "expert_parallel_size": 2,
    "gpus_per_node": 8,
    "kv_block_size": 64,
    "max_queued_requests": 5,
    "max_queued_tokens": 600,
    "max_seq_len": 5,
    "free_gpu_memory_fraction": 0.5,
    "endpoint_types": "completions",
    "custom_jinja_template": __file__,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "structural_tag": "false",
    "dump_config_to": "config.json",
    "decode_busy_threshold": 0.8,
    "prefill_busy_threshold": 0.4,
    "eff_isl_ratio_threshold": 0.5,
    "admin_key_file": __file__,
    "nats_server": "nats://other:4222",
}


def other_value(name: str) -> Any:
    """One that is allowed, and is not the default."""
    default, allowed = SETTINGS[name].default, SETTINGS[name].allowed
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + 1
    choices = allowed.choices if allowed is not None else ()
    assert choices, f"OTHER_VALUES has a value of {name} that is not its default"
    return next(each for each in choices if each != default)


#: Only a worker that calls another one takes these.
CALLERS_ONLY = ("next_endpoint", "schedule_style", *ORCHESTRATION)
NEEDS_DECODE = ("--disaggregation-mode", "decode")


@pytest.mark.parametrize("name", SETTINGS)
def test_every_flag_is_read(name: str) -> None:
    value = other_value(name)
    assert value != SETTINGS[name].default
    switch = {True: flag_of(name), False: names_of_switch(flag_of(name))[1]}
    argv = [switch[value]] if isinstance(value, bool) else [flag_of(name), str(value)]
    config = parse(*(NEEDS_DECODE if name in CALLERS_ONLY else ()), *argv)
    assert config.value_of(name) == value
    assert name in config.explicit


@pytest.mark.parametrize(
    ("name", "variable"), [(name, variable) for name, flag in SETTINGS.items() for variable in flag.variables]
)
def test_every_variable_is_read(name: str, variable: str) -> None:
    value = other_value(name)
    model = [] if name == "model" else ["--model", "m"]
    argv = [*model, *(NEEDS_DECODE if name in CALLERS_ONLY else ())]
    config = parse_worker_args(argv, {variable: str(value)})
    assert config.value_of(name) == value
    assert name in config.explicit


def test_a_flag_wins_over_our_variable_that_over_dynamos_and_that_over_the_default() -> None:
    dynamo = {"DYN_TRTLLM_MAX_BATCH_SIZE": "3"}
    ours = {**dynamo, "TRTLLM_DISAGG_MAX_BATCH_SIZE": "2"}
    assert parse("--max-batch-size", "1", **ours).max_batch_size == 1
    assert parse(**ours).max_batch_size == 2
    assert parse(**dynamo).max_batch_size == 3
    assert parse().max_batch_size == WorkerConfig(model="m").max_batch_size


def test_no_flags_give_the_defaults_of_the_dataclass_without_etcd_and_nats() -> None:
    config = parse()
    assert dataclasses.replace(config, explicit=frozenset()) == WorkerConfig(model="m")
    assert (config.discovery_backend, config.request_plane, config.event_plane) == ("file", "tcp", "zmq")


def test_an_empty_variable_is_not_set() -> None:
    assert parse(TRTLLM_DISAGG_MAX_SEQ_LEN="", DYN_NAMESPACE="").namespace == "dynamo"


def test_dynamos_present_and_former_flag_names_are_accepted() -> None:
    assert parse_worker_args(["--model-path", "p"], {}).model == "p"
    for word in ("agg", "pd", "prefill_and_decode"):
        assert parse("--disaggregation-mode", word).role is Role.AGG
    assert parse("--dyn-endpoint-types", "chat").endpoint_types == "chat"
    assert parse("--no-publish-kv-events", DYN_TRTLLM_PUBLISH_KV_EVENTS="1").publish_kv_events is False


def test_case_and_spaces_of_endpoint_types_do_not_matter() -> None:
    config = parse("--endpoint-types", "Chat, completions")
    assert names_of_endpoint_types(config.endpoint_types) == ["chat", "completions"]


def test_the_old_publish_flag_stands_for_both() -> None:
    config = parse("--publish-events-and-metrics")
    assert config.publish_kv_events
    assert config.publish_metrics
    later = parse("--publish-events-and-metrics", "--no-publish-metrics")
    assert (later.publish_kv_events, later.publish_metrics) == (True, False)
    off = parse("--no-publish-events-and-metrics", DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS="true")
    assert (off.publish_kv_events, off.publish_metrics) == (False, False)


@pytest.mark.parametrize(
    ("argv", "environ", "parts"),
    [
        (["--max-batch-size", "many"], {}, ["--max-batch-size", "'many'", "an integer"]),
        ([], {"DYN_TRTLLM_KV_BLOCK_SIZE": "3"}, ["DYN_TRTLLM_KV_BLOCK_SIZE", "3", "a power of two"]),
        ([], {"TRTLLM_DISAGG_PUBLISH_METRICS": "maybe"}, ["TRTLLM_DISAGG_PUBLISH_METRICS", "'maybe'"]),
        ([], {"DYN_TRTLLM_FREE_GPU_MEMORY_FRACTION": "x"}, ["FREE_GPU_MEMORY_FRACTION", "a number"]),
        ([], {"DYN_ENDPOINT": "nowhere"}, ["DYN_ENDPOINT", "'nowhere'", "dyn://"]),
        (["--max-bach-size", "1"], {}, ["--max-bach-size", "did you mean --max-batch-size?"]),
        (["--max-batch", "1"], {}, ["--max-batch", "did you mean --max-batch-size?"]),
        (["--xyzzy"], {}, ["--xyzzy", "--help"]),
        (["stray"], {}, ["unknown argument stray"]),
        (["--model"], {}, ["--model"]),
        (["--custom-jinja-template", "/no/such"], {}, ["--custom-jinja-template", "'/no/such'"]),
    ],
)
def test_a_bad_argument_is_named(argv: list[str], environ: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv, **environ)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_worker_revision_is_appended_to_the_namespace_unless_an_endpoint_names_it() -> None:
    by_operator = parse(DYN_NAMESPACE_WORKER_SUFFIX="blue")
    assert (by_operator.namespace, by_operator.worker_revision) == ("dynamo-blue", "blue")
    assert parse("--worker-revision", "v2", DYN_NAMESPACE_WORKER_SUFFIX="blue").namespace == "dynamo-v2"
    with pytest.raises(ConfigError, match=r"--worker-revision: 'v\.2' is not allowed; expected letters"):
        parse("--worker-revision", "v.2")
    assert parse("--namespace", "ns", DYN_NAMESPACE_WORKER_SUFFIX="blue").namespace == "ns-blue"
    config = parse("--endpoint", "dyn://ns.c.e", DYN_NAMESPACE="other", DYN_NAMESPACE_WORKER_SUFFIX="x")
    assert config.namespace == "ns"
    with pytest.raises(ConfigError, match="--endpoint"):
        parse("--endpoint", "dyn://ns.c.e", "--namespace", "other")


def test_an_endpoint_without_its_scheme_is_the_same_endpoint() -> None:
    decode = ("--disaggregation-mode", "decode")
    config = parse(*decode, "--endpoint", "ns.c.e", "--next-endpoint", "ns.c.n")
    assert config == parse(*decode, "--endpoint", "dyn://ns.c.e", "--next-endpoint", "dyn://ns.c.n")
    for given in ("ns/c/e", "ns.c.e", "dyn://ns.c.e"):
        assert parse("--kv-state-endpoint", given).kv_state_endpoint == given
    with pytest.raises(ConfigError, match="another endpoint than this"):
        parse(*decode, "--endpoint", "dyn://ns.c.e", "--next-endpoint", "ns.c.e")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"DYN_NAMESPACE": "theirs", "TRTLLM_DISAGG_NAMESPACE": "ours", "DYN_NAMESPACE_WORKER_SUFFIX": "blue"},
        {"DYN_NAMESPACE": "theirs", "TRTLLM_DISAGG_NAMESPACE": "", "TRTLLM_DISAGG_EVENT_PLANE": "nats"},
        {"DYN_ENDPOINT": "dyn://ns.c.e", "DYN_NAMESPACE_WORKER_SUFFIX": "x", "DYN_REQUEST_PLANE": "nats"},
        {"ETCD_ENDPOINTS": "http://etcd"},
        {"ETCD_ENDPOINTS": "http://etcd", "TRTLLM_DISAGG_DISCOVERY_BACKEND": "kubernetes"},
    ],
)
def test_a_deployment_is_where_its_workers_are_by_the_same_variables(environ: dict[str, str]) -> None:
    config = parse(**environ)
    assert whereabouts_of(environ) == {name: getattr(config, name) for name in WHEREABOUTS}


def test_a_template_in_the_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "chat.jinja").touch()
    template = parse("--custom-jinja-template", "~/chat.jinja").custom_jinja_template
    assert template == str(tmp_path / "chat.jinja")
