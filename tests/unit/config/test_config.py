"""WorkerConfig: which stage a worker is, where it is reached, what it refuses by name; and the table of deciders."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import ROOT
from tests.support.worker_args import parse_worker_args
from trtllm_disagg.config.deciders import BY_OCCUPANCY, DECIDERS
from trtllm_disagg.config.engine_args import build_engine_args, dump_config, with_engine_args
from trtllm_disagg.config.settings import parse_endpoint_id
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.handlers.live_state import LiveState
from trtllm_disagg.tools.up.ports import free_http_port
from trtllm_disagg.tools.up.run_dir import RunDir
from trtllm_disagg.tools.up.up_command import add_arguments, config_from


def config(**values: Any) -> WorkerConfig:
    return WorkerConfig(**{"model": "m"} | values)


FIRST = "dyn://dynamo.tensorrt_llm.generate"
DECODE = "dyn://dynamo.backend.generate"
PREFILL = "dyn://dynamo.prefill.generate"
FAIL = {"role": "decode", "on_missing_stage": "fail"}


@pytest.mark.parametrize(
    ("strategy", "role", "first", "calls", "endpoint", "next_endpoint", "peer"),
    [
        ("decode_first", "agg", True, False, DECODE, None, None),
        ("decode_first", "decode", True, True, FIRST, PREFILL, PREFILL),
        ("decode_first", "prefill", False, False, PREFILL, None, DECODE),
        ("prefill_first", "agg", True, False, DECODE, None, None),
        ("prefill_first", "prefill", True, True, FIRST, DECODE, DECODE),
        ("prefill_first", "decode", False, False, DECODE, None, PREFILL),
        ("router", "agg", True, False, DECODE, None, None),
        ("router", "prefill", True, False, PREFILL, None, DECODE),
        ("router", "decode", True, False, DECODE, None, PREFILL),
    ],
)
def test_a_stage_follows_from_strategy_and_role(
    strategy: str,
    role: str,
    first: bool,
    calls: bool,
    endpoint: str,
    next_endpoint: str | None,
    peer: str | None,
) -> None:
    worker = config(strategy=strategy, role=role)
    assert (worker.role, worker.is_first_stage, worker.calls_second_stage) == (Role(role), first, calls)
    assert worker.endpoint_id == endpoint
    assert (worker.next_endpoint_id, worker.peer_endpoint_id) == (next_endpoint, peer)
    if peer is not None:
        other = config(strategy=strategy, role={"prefill": "decode", "decode": "prefill"}[role])
        assert other.worker_endpoint_id == peer


def test_given_endpoints_win_over_the_derived_ones() -> None:
    worker = config(role="decode", endpoint="dyn://dynamo.a.b", next_endpoint="dyn://other.c.d")
    assert worker.endpoint_id == "dyn://dynamo.a.b"
    assert worker.next_endpoint_id == "dyn://other.c.d"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"role": "encode"}, "--disaggregation-mode: 'encode' is not allowed; expected one of agg"),
        ({"strategy": "both"}, "--disaggregation-strategy: 'both'"),
        ({"engine": "vllm"}, "--engine: 'vllm' is not allowed; expected one of auto, tensorrt_llm, embedded"),
        ({"served_model_name": ""}, "--served-model-name: ''"),
        ({"namespace": "a.b"}, "--namespace: 'a.b'"),
        ({"endpoint": "dynamo/a/b"}, "--endpoint: 'dynamo/a/b'"),
        ({"endpoint": "dyn://dynamo.a"}, "expected dyn://namespace.component.endpoint"),
        ({"endpoint": "dyn://other.a.b"}, "expected an endpoint in the namespace 'dynamo'"),
        ({"next_endpoint": "dyn://dynamo.a.b"}, "--next-endpoint: 'dyn://dynamo.a.b'"),
        ({"role": "decode", "next_endpoint": FIRST}, "another endpoint than this worker's own"),
        ({"role": "prefill", "next_endpoint": PREFILL}, "in mode prefill under decode_first"),
        ({"strategy": "router", "role": "decode", "next_endpoint": PREFILL}, "under router"),
        ({"kv_state_endpoint": "dynamo.a"}, "expected namespace/component/endpoint"),
        (FAIL | {"max_local_fallbacks": 2}, "--max-local-fallbacks: 2"),
        (FAIL | {"max_local_fallback_tokens": 9}, "--max-local-fallback-tokens: 9"),
        ({"model": " "}, "--model"),
        ({"role": "decode", "max_beam_width": 2}, "--max-beam-width: 2"),
        ({"schedule_style": "generation_first"}, "--schedule-style: 'generation_first'"),
        (
            {"role": "decode", "prefill_dispatch": "queue", "schedule_style": "generation_first"},
            "--prefill-dispatch: 'queue'",
        ),
        ({"kv_block_size": 48}, "--kv-block-size: 48 is not allowed; expected a power of two"),
        ({"kv_block_size": 0}, "--kv-block-size: 0"),
        ({"max_batch_size": 0}, "--max-batch-size: 0"),
        ({"max_num_tokens": -1}, "--max-num-tokens: -1"),
        ({"max_seq_len": 0}, "--max-seq-len: 0"),
        ({"tensor_parallel_size": True}, "--tensor-parallel-size: True"),
        ({"gpus_per_node": 0}, "--gpus-per-node: 0"),
        ({"free_gpu_memory_fraction": 1.5}, "--free-gpu-memory-fraction: 1.5"),
        ({"load_format": "fast"}, "--load-format: 'fast'"),
        ({"guided_decoding_backend": "outlines"}, "--guided-decoding-backend: 'outlines'"),
        ({"discovery_backend": "dns"}, "--discovery-backend: 'dns'"),
        ({"endpoint_types": "chat,images"}, "--endpoint-types: 'chat,images'"),
        ({"endpoint_types": "none,chat"}, "--endpoint-types: 'none,chat'"),
    ],
)
def test_a_bad_value_names_the_flag_the_value_and_what_is_allowed(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**values)
    assert message in str(caught.value)


def test_an_endpoint_splits_into_its_parts() -> None:
    parts = parse_endpoint_id("dyn://ns.comp.ep")
    assert parts == ("ns", "comp", "ep")
    assert parts.dotted == "ns.comp.ep"
    assert parts.url == "dyn://ns.comp.ep"
    with pytest.raises(ConfigError, match="DYN_ENDPOINT"):
        parse_endpoint_id("ns.comp", "DYN_ENDPOINT")


# -- values that make no sense, however odd they are


HUGE = "99999999999999999999999"
LONG = "x" * 5000


def built(*flags: str) -> WorkerConfig:
    """As far as a worker gets before it loads anything."""
    config = parse_worker_args(["--model", "org/model", "--engine", "embedded", *flags], {})
    config = with_engine_args(config, build_engine_args(config))
    LiveState.of(config, 16)
    return config


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(
            (flag, HUGE)
            for flag in (
                "--breaker-failures",
                "--max-batch-size",
                "--max-num-tokens",
                "--max-seq-len",
                "--tensor-parallel-size",
            )
        ),
        # What has failed a request travels with it, and that list is bounded.
        ("--max-tries", "65"),
    ],
)
def test_number_above_the_flags_bound_is_refused(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag}: {value} .* from 1 to"):
        built("--disaggregation-mode", "decode", flag, value)
    assert built("--disaggregation-mode", "decode", "--max-tries", "64").max_tries == 64


@pytest.mark.parametrize(
    "url",
    [
        "nats://127.0.0.1:99999",
        "nats://127.0.0.1:port",
        "nats://[::1:4222",
        "nats://:4222",
        "nats://",
        "nats://one:4222,nats://two:x",
        "http://127.0.0.1:4222",
        "me:secret@h:1",
        "nats://me:secret@h:x",
        "nats://a:1,me:secret@h",
        "nats://me:secret@,secret@:4222",
    ],
)
def test_invalid_nats_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--nats-server: .* nats://host:port") as raised:
        built("--disaggregation-mode", "decode", "--prefill-dispatch", "queue", "--nats-server", url)
    assert "secret" not in str(raised.value)
    assert ("***@" in str(raised.value)) is ("@" in url)


@pytest.mark.parametrize("url", ["nats://h", "nats://[::1]:4222", "tls://u:p@h:1,nats://b"])
def test_every_form_of_a_nats_address_is_taken(url: str) -> None:
    assert built("--nats-server", url).nats_server == url


@pytest.mark.parametrize("flag", ["--extra-engine-args", "--custom-jinja-template", "--model"])
@pytest.mark.parametrize("path", [LONG, "/" + LONG, "nul\0"], ids=["long", "absolute", "nul"])
def test_impossible_path_is_refused_in_a_short_message(flag: str, path: str) -> None:
    if flag == "--model" and not path.startswith("/"):
        pytest.skip("a name on the hub")
    with pytest.raises(ConfigError, match=flag) as raised:
        built("--disaggregation-mode", "decode", flag, path)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("flag", ["--extra-engine-args", "--custom-jinja-template", "--dump-config-to"])
def test_home_of_an_unknown_user_is_refused_by_the_flags_name(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: '~no_such_user/file' is not allowed"):
        dump_config(built(flag, "~no_such_user/file"), {})


@pytest.mark.parametrize("text", ["9" * 5000, '{"max_batch_size": ' + "9" * 5000 + "}", "[" * 100_000])
def test_json_that_python_cannot_read_is_refused_in_a_short_message(text: str) -> None:
    with pytest.raises(ConfigError, match="--override-engine-args is not JSON: ") as raised:
        built("--override-engine-args", text)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "text", ['{"dtype": "auto", "dtype": "auto"}', '{"kv_cache_config": {"dtype": "auto", "dtype": "auto"}}']
)
def test_json_with_a_key_that_is_there_twice_is_refused_as_in_yaml(text: str) -> None:
    with pytest.raises(ConfigError, match="dtype is there twice in"):
        built("--override-engine-args", text)


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (["--policy-file", "p.yaml"], {}),
        (["--policy-file=p.yaml"], {}),
        ([], {"TRTLLM_DISAGG_POLICY_FILE": "p"}),
    ],
)
def test_policy_file_is_refused_with_the_command_that_is_in_its_place(
    flags: list[str], environ: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=r"(--policy-file|_POLICY_FILE) is gone .*`trtllm-disagg set`"):
        parse_worker_args(["--model", "m", *flags], environ)


def up(*flags: str) -> Any:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from(parser.parse_args(["--strategy", "agg", "--model", "m", *flags]), Path("run"))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--engine-configs", LONG),
        ("--startup-timeout", "nan"),
        ("--stop-timeout", "nan"),
        ("--http-host", ""),
        ("--http-host", " "),
    ],
)
def test_impossible_value_of_up_is_refused_by_its_flag(flag: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: "):
        up(flag, value, "--run-dir", str(tmp_path))


@pytest.mark.parametrize("host", ["a..b", "x" * 100])
def test_http_host_without_an_address_is_refused_by_its_flag(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--http-host: .* is not allowed; expected an address or a name"):
        free_http_port(host, 0)


@pytest.mark.parametrize("path", ["file", "file/run", "/proc/run", LONG])
def test_run_directory_that_cannot_be_created_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--run-dir: .* a directory that"):
        RunDir.claim(tmp_path / path)


# -- deciders


PROGRAM = """
import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path
from trtllm_disagg.config.deciders import DECIDERS, Decision
from trtllm_disagg.config.settings import POSITIVE, option

@dataclass(frozen=True, slots=True)
class Toy:
    toy_divisor: int = option(2, "prompts of so many tokens, or twice as many, stay", POSITIVE)

    def decide(self, facts):
        return Decision(facts.num_prompt % self.toy_divisor > 0, "divisor")

DECIDERS["toy"] = Toy

from tests.support.handling import collect, request
from trtllm_disagg.tools.admin import set_command
from tests.support.worker_args import parse_worker_args
from trtllm_disagg.config.args import add_worker_arguments
from trtllm_disagg.config.thresholds import check_thresholds
from trtllm_disagg.tools.up.plan import DeploymentConfig, worker_spec
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.handlers.live_state import LiveState
from tests.support.recording_pair import make_pair

ARGV = ["--model", "m", "--disaggregation-mode", "decode", "--prefill-decider", "toy"]

def by_flag_and_variable():
    config = parse_worker_args([*ARGV, "--toy-divisor", "3"], {"TRTLLM_DISAGG_TOY_DIVISOR": "5"})
    assert config.reads_kv_events
    assert config.thresholds["toy_divisor"] == 3
    assert config.is_explicit("toy_divisor")
    assert parse_worker_args(ARGV, {"TRTLLM_DISAGG_TOY_DIVISOR": "5"}).thresholds["toy_divisor"] == 5
    assert parse_worker_args(ARGV, {}).thresholds["toy_divisor"] == 2
    try:
        parse_worker_args([*ARGV, "--toy-divisor", "0"], {})
    except ConfigError as error:
        assert "--toy-divisor: 0 is not allowed; expected an integer" in str(error), error
    else:
        raise AssertionError("0 was taken")

def by_command():
    live = LiveState.of(parse_worker_args(ARGV, {}), 4)
    assert live.set_thresholds({"toy_divisor": 4}, "set") == ["toy_divisor: 2 -> 4"]
    check_thresholds({"toy_divisor": 4}, "set")
    parser = argparse.ArgumentParser()
    set_command.add_arguments(parser)
    assert parser.parse_args(["--toy-divisor", "4"]).toy_divisor == 4
    assert "--toy-divisor" in parser.format_help()

def in_help():
    parser = argparse.ArgumentParser()
    add_worker_arguments(parser)
    text = " ".join(parser.format_help().split())
    assert "prompts of so many tokens, or twice as many, stay (default: 2) [TRTLLM_DISAGG_TOY_DIVISOR]" in text, text

def to_the_workers_of_up():
    config = DeploymentConfig("auto", "m", "m", Path("/run"), thresholds={"toy_divisor": 4})
    argv = worker_spec(config, "decode", 0, {}, 20000).argv
    assert argv[-2:] == ("--toy-divisor", "4"), argv

async def answers():
    for tokens, way in (([11, 12, 13], "local"), ([11, 12], "decode_first")):
        pair = make_pair("decode_first", prefill_decider="toy", thresholds={"toy_divisor": 3})
        asked = request(token_ids=tokens)
        assert await collect(pair.generate, asked)
        assert (asked.trace.strategy, asked.trace.reason) == (way, "divisor")

by_flag_and_variable()
by_command()
in_help()
to_the_workers_of_up()
asyncio.run(answers())
print("all know it")
"""


def test_every_decider_of_the_table_has_a_row_in_its_page() -> None:
    page = (ROOT / "docs" / "reference" / "deciders.md").read_text(encoding="utf-8")
    without = [name for name in DECIDERS if f"\n| `{name}` " not in page]
    assert without == [], "docs/reference/deciders.md has a row for each decider"


def test_every_decider_that_uses_the_occupancy_is_listed() -> None:
    """For the others it is unknown: no worker asks those of the other role."""
    users = {name for name, rule in DECIDERS.items() if "other_occupancy" in rule.decide.__code__.co_names}
    assert users == set(BY_OCCUPANCY), (
        "deciders.BY_OCCUPANCY lists the deciders that use facts.other_occupancy"
    )


def test_a_toy_decider_and_its_threshold_need_their_class_and_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("all know it\n", "", 0)
