"""The flags of `up`, which refuses what its workers would refuse, before any process starts."""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.deployments import ROOT
from trtllm_disagg.common.cli import run
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.config.args import WHEREABOUTS, parse_worker_flags, whereabouts_of
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up import lifecycle, up_command
from trtllm_disagg.tools.up.plan import PLANES, DeploymentConfig, plan, shared_env, worker_arguments

ENGINE_CONFIGS = ROOT / "engine_configs"


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Words of an `up` that starts nothing."""

    async def serve(config: DeploymentConfig, status: object) -> ExitCode:
        return ExitCode.DONE

    monkeypatch.setattr(lifecycle, "serve", serve)
    monkeypatch.setattr(up_command, "servable_model", lambda model: model)
    monkeypatch.setattr(up_command, "is_complete", lambda directory: True)
    return ["up", "--strategy", "decode_first", "--model", "m", "--run-dir", str(tmp_path / "run")]


def config_of(*argv: str) -> DeploymentConfig:
    parser = argparse.ArgumentParser()
    up_command.add_arguments(parser)
    return up_command.config_from(parser.parse_args(["--model", "org/toy", *argv]), Path("run"))


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--kv-block-size=33", "^--kv-block-size: 33 is not allowed; expected a power of two"),
        ("--engine=nope", "^--engine: 'nope' is not allowed; expected one of auto, "),
        ("--namespace=a/b", "^--namespace: 'a/b' is not allowed; expected letters"),
        ("--served-model-name=", "^--served-model-name: '' is not allowed; expected a name"),
        ("--served-model-name= ", "^--served-model-name: ' ' is not allowed; expected a name"),
        ("--worker-args=--served-model-name x", "^--worker-args: --served-model-name is a flag of `up`"),
        ("--worker-args=--max-tries many", "^--worker-args: --max-tries: 'many' is not allowed"),
        ("--worker-args=--max-trees 3", "^--worker-args: unknown flag --max-trees; did you mean --max-tries"),
        ("--worker-args='", "^--worker-args: No closing quotation"),
        ("--frontend-args='", "^--frontend-args: No closing quotation"),
        (
            "--frontend-args=--tls-cert c",
            "^--frontend-args: --tls-cert is decided by `up`: .* put TLS before",
        ),
        ("--agg-workers=1", "--agg-workers: 1 .* --strategy agg, not decode_first"),
        (
            "--engine-configs=/none",
            r"--engine-configs: '/none' .* directory with prefill\.yaml and decode\.yaml",
        ),
    ],
)
def test_up_refuses_what_its_workers_would_refuse(up: list[str], flag: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run([*up, flag])


def test_up_refuses_a_frontend_that_speaks_tls_by_its_environment(
    up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_TLS_CERT_PATH", "/c.pem")
    with pytest.raises(ConfigError, match=r"^DYN_TLS_CERT_PATH: '/c\.pem' is not allowed; expected none"):
        run(up)


def test_up_refuses_an_engine_file_before_anything_starts(up: list[str], tmp_path: Path) -> None:
    for role in ("prefill", "decode"):
        (tmp_path / f"{role}.yaml").write_text("max_num_tokns: 4")
    with pytest.raises(ConfigError, match=r"\.yaml: unknown key max_num_tokns .*mean max_num_tokens"):
        run([*up, f"--engine-configs={tmp_path}"])


def test_missing_weights_are_refused_before_anything_starts(
    up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_command, "is_complete", lambda directory: False)
    with pytest.raises(ConfigError, match=r"--model: 'm'.*its weights"):
        run([*up, "--engine", "embedded"])
    assert run([*up, "--engine", "recording"]) is ExitCode.DONE


@pytest.mark.parametrize(
    ("files", "more", "is_refused"),
    [
        ({}, [], True),
        ({"tokenizer_config.json": '{"chat_template": "x"}'}, [], False),
        ({"chat_template.jinja": "x"}, [], False),
        ({"config.json": '{"model_type": "deepseek_v32"}'}, [], False),
        ({}, ["--worker-args=--endpoint-types completions"], False),
        ({"own.jinja": "x"}, ["--worker-args=--custom-jinja-template own.jinja"], False),
    ],
)
def test_a_model_without_chat_template_is_refused_where_chats_are_served(
    up: list[str],
    files: dict[str, str],
    more: list[str],
    is_refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo's frontend would try for ever; for DeepSeek it has templates of its own."""
    monkeypatch.chdir(tmp_path)
    for name, content in ({"config.json": "{}", "tokenizer_config.json": "{}"} | files).items():
        (tmp_path / name).write_text(content)
    argv = [*up, "--model", str(tmp_path), *more]
    if is_refused:
        with pytest.raises(ConfigError, match=r"--model: .*/tokenizer_config\.json has no chat_template"):
            run(argv)
    else:
        assert run(argv) is ExitCode.DONE


@pytest.mark.parametrize(
    "flag", ["--engine=auto", "--worker-args=--max-tries 3 --trtllm.max_seq_len 64", "--namespace=a-b"]
)
def test_up_starts_with_what_its_workers_accept(up: list[str], flag: str) -> None:
    assert run([*up, flag]) is ExitCode.DONE


def test_flags_become_a_config(tmp_path: Path) -> None:
    for role in ("prefill", "decode"):
        (tmp_path / f"{role}.yaml").touch()
    flags = ("--prefill-workers=2", "--worker-args=--max-tries 1 --revision 'a b'")
    config = config_of("--strategy=router", *flags, "--startup-timeout=7", f"--engine-configs={tmp_path}")
    assert (config.strategy, config.prefill_workers, config.decode_workers) == ("router", 2, 1)
    assert config.worker_args == ("--max-tries", "1", "--revision", "a b")
    assert (config.startup_timeout, config.served_model_name) == (7, "org/toy")
    assert config.engine_configs == {role: tmp_path / f"{role}.yaml" for role in ("prefill", "decode")}
    assert up_command.default_name(f"{tmp_path}/") == tmp_path.name


@pytest.mark.parametrize("name", ["demo", "engine_configs/demo"])
def test_engine_files_that_come_with_the_package_are_found_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of("--strategy=agg", f"--engine-configs={name}")
    assert config.engine_configs["agg"] == ROOT / "engine_configs/demo/agg.yaml"
    (tmp_path / name).mkdir(parents=True)  # your own is first
    with pytest.raises(ConfigError, match="a directory with agg"):
        config_of("--strategy=agg", f"--engine-configs={name}")


def test_workers_that_may_flip_have_one_file_for_both_roles(up: list[str], tmp_path: Path) -> None:
    file = ENGINE_CONFIGS / "demo" / "flex.yaml"
    config = config_of("--strategy=decode_first", "--engine-configs=demo", "--flex")
    assert config.engine_configs == {"prefill": file, "decode": file}
    chosen, told = up_command.engine_configs_for("Qwen/Qwen3-8B", "router", flex=True)
    assert set(chosen.values()) == {ENGINE_CONFIGS / "qwen3" / "flex.yaml"}
    assert "qwen3, for Qwen3 (dense, up to 14B)" in told
    for flags, allowed in (
        (["--strategy=agg", "--engine-configs=demo"], "--strategy prefill_first, decode_first, .*, not agg"),
        (["--strategy=auto", f"--engine-configs={tmp_path}"], r"a directory with flex\.yaml$"),
    ):
        with pytest.raises(ConfigError, match=allowed):
            config_of(*flags, "--flex")
    with pytest.raises(ConfigError, match="--flex: True is not allowed; expected --engine-configs DIR"):
        run([*up, "--engine=embedded", "--flex"])


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("Qwen/Qwen3-32B", "qwen3-32b-fp8"),
        ("Qwen/Qwen3-8B-Base", "qwen3"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b-fp8"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", "llama-3.3-70b-fp8"),
        ("Qwen/Qwen2.5-VL-3B-Instruct", "qwen2.5-vl"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("DeepSeek-R1-0528-NVFP4-v2", "deepseek-r1"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", None),
        ("Qwen/Qwen3-30B-A3B", None),
        ("org/demo", None),
    ],
)
def test_engine_configs_fit_the_models_name_or_the_limits_without_are_said(
    model: str, folder: str | None
) -> None:
    files, told = up_command.engine_configs_for(model, "decode_first")
    assert {file.parent.name for file in files.values()} == ({folder} if folder else set())
    limits = "at most 2048 requests and 8192 tokens, longer prompts get 400"
    assert (f"{folder}, for " if folder else limits) in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "engine files: "),
        (["--engine=embedded"], ""),
        (["--worker-args=--max-seq-len 8192"], ""),
        ([f"--engine-configs={ENGINE_CONFIGS / 'qwen3'}"], ""),
    ],
    ids=["by name", "another engine", "flags", "given"],
)
def test_up_takes_engine_configs_by_name_unless_the_engine_or_its_arguments_are_given(
    up: list[str], more: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*up, "--engine=tensorrt_llm", "--model=openai/gpt-oss-120b", *more]) is ExitCode.DONE
    said = capsys.readouterr().err
    assert said.startswith(told)
    assert bool(said) is bool(told)


def test_wrong_settings_leave_no_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError):
        run(["up", "--strategy=auto", "--model=m", "--engine-configs=/none"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("flags", "seconds"), [((), 9.0), (("--drain-seconds=4",), 4.0)])
def test_drain_seconds_of_up_follow_flag_and_variable(
    flags: tuple[str, ...], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTLLM_DISAGG_DRAIN_SECONDS", "9")
    assert config_of("--strategy=agg", *flags).drain_seconds == seconds
    monkeypatch.setenv("TRTLLM_DISAGG_DRAIN_SECONDS", "soon")
    with pytest.raises(ConfigError, match="TRTLLM_DISAGG_DRAIN_SECONDS: 'soon' is not allowed"):
        config_of("--strategy=agg")


def test_workers_are_where_up_is_whatever_the_environment_says(tmp_path: Path) -> None:
    environ = {f"TRTLLM_DISAGG_{name.upper()}": "nats" for name in WHEREABOUTS}
    environ |= {"DYN_NAMESPACE_WORKER_SUFFIX": "blue", "ETCD_ENDPOINTS": "http://etcd"}
    config = DeploymentConfig("decode_first", "m", "m", tmp_path, namespace="here")
    for spec in plan(config, system_ports=itertools.count(20001), environ=environ):
        assert whereabouts_of({**environ, **spec.env}) == PLANES | {"namespace": "here"}


@pytest.mark.parametrize(
    ("flags", "variable", "dispatch"),
    [
        ([], "", "direct"),
        ([], "queue", "queue"),
        (["--prefill-dispatch=direct"], "queue", "direct"),
        (["--prefill-dispatch=queue"], "direct", "queue"),
    ],
)
def test_up_and_its_workers_agree_on_the_prefill_queue(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], variable: str, dispatch: str
) -> None:
    """Workers would use the variable where `up` starts no NATS."""
    monkeypatch.setenv("TRTLLM_DISAGG_PREFILL_DISPATCH", variable)
    config = config_of("--strategy=decode_first", *flags)
    assert config.has_queue is (dispatch == "queue")
    environ = {"TRTLLM_DISAGG_PREFILL_DISPATCH": variable}
    environ |= shared_env(config, environ)
    for arguments in worker_arguments(config).values():
        assert parse_worker_flags(arguments, environ).prefill_dispatch == dispatch


SIGNALLED_UP = """
import asyncio, signal, sys
from trtllm_disagg.common import cli
from trtllm_disagg.tools.up import lifecycle, up_command
number = signal.Signals(int(sys.argv[1]))
async def early(config, status):
    signal.raise_signal(number)
    await asyncio.sleep(60)
async def late(config, status):
    with lifecycle.Interrupts().listening() as interrupts:
        signal.raise_signal(number)
        await interrupts.stop.wait()
    signal.raise_signal(number)
    return interrupts.exit_code
lifecycle.serve = {when}
up_command.servable_model = str
up_command.is_complete = bool
cli.main(["up", "--strategy", "decode_first", "--model", "m"])
"""


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_that_a_signal_ends_before_or_after_it_listens_leaves_no_directory(
    number: signal.Signals, when: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SIGNALLED_UP.format(when=when), str(int(number))]
    up = subprocess.run(command, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    assert (up.returncode, up.stderr) == (128 + number, "")
    assert list(tmp_path.iterdir()) == []
