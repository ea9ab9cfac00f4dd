"""`up` refuses what its workers would refuse, before any process starts."""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_disagg.cli import run
from trtllm_disagg.config.args import WHEREABOUTS, parse_worker_flags, whereabouts_of
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.tools.up import lifecycle, up_command
from trtllm_disagg.tools.up.plan import PLANES, DeploymentConfig, plan, shared_env, worker_arguments


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Words of an `up` that starts nothing."""

    async def serve(config: DeploymentConfig, status: object) -> ExitCode:
        return ExitCode.DONE

    monkeypatch.setattr(lifecycle, "serve", serve)
    monkeypatch.setattr(up_command, "servable_model", lambda model: model)
    return ["up", "--strategy", "decode_first", "--model", "m", "--run-dir", str(tmp_path / "run")]


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--kv-block-size=33", "^--kv-block-size: 33 is not allowed; expected a power of two"),
        ("--engine=nope", "^--engine: 'nope' is not allowed; expected one of auto, "),
        ("--namespace=a/b", "^--namespace: 'a/b' is not allowed; expected letters"),
        ("--served-model-name=", "^--served-model-name: '' is not allowed; expected a name"),
        ("--served-model-name= ", "^--served-model-name: ' ' is not allowed; expected a name"),
        (
            "--worker-args=--max-tries many",
            "^--worker-args: --max-tries: 'many' is not allowed; expected a whole",
        ),
        ("--worker-args=--max-trees 3", "^--worker-args: unknown flag --max-trees; did you mean --max-tries"),
        ("--worker-args='", "^--worker-args: No closing quotation"),
        ("--frontend-args='", "^--frontend-args: No closing quotation"),
    ],
)
def test_up_refuses_what_its_workers_would_refuse(up: list[str], flag: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run([*up, flag])


@pytest.mark.parametrize(
    "flag", ["--engine=auto", "--worker-args=--max-tries 3 --trtllm.max_seq_len 64", "--namespace=a-b"]
)
def test_up_starts_with_what_its_workers_accept(up: list[str], flag: str) -> None:
    assert run([*up, flag]) is ExitCode.DONE


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_up_starts_at_most_as_many_workers_as_scale(up: list[str], role: str) -> None:
    assert run([*up, f"--{role}-workers=64"]) is ExitCode.DONE
    with pytest.raises(ConfigError, match=f"^--{role}-workers: 65 is not allowed; expected 1 to 64 workers"):
        run([*up, f"--{role}-workers=65"])


def test_workers_are_where_up_is_whatever_the_environment_says(tmp_path: Path) -> None:
    environ = {f"TRTLLM_DISAGG_{name.upper()}": "nats" for name in WHEREABOUTS}
    environ |= {"DYN_NAMESPACE_WORKER_SUFFIX": "blue", "ETCD_ENDPOINTS": "http://etcd"}
    config = DeploymentConfig("decode_first", "m", "m", tmp_path, namespace="here")
    specs = plan(config, system_ports=itertools.count(20001), environ=environ)
    for spec in specs:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], variable: str, dispatch: str
) -> None:
    """Workers would use the variable where `up` starts no NATS."""
    monkeypatch.setenv("TRTLLM_DISAGG_PREFILL_DISPATCH", variable)
    parser = argparse.ArgumentParser()
    up_command.add_arguments(parser)
    args = parser.parse_args(["--strategy", "decode_first", "--model", "m", *flags])
    config = up_command.config_from(args, tmp_path)
    assert config.has_queue is (dispatch == "queue")
    environ = {"TRTLLM_DISAGG_PREFILL_DISPATCH": variable}
    environ |= shared_env(config, environ)
    for arguments in worker_arguments(config).values():
        assert parse_worker_flags(arguments, environ).prefill_dispatch == dispatch


SIGNALLED_UP = """
import asyncio, signal, sys
from trtllm_disagg import cli
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
cli.main(["up", "--strategy", "decode_first", "--model", "m"])
"""


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_that_a_signal_ends_before_or_after_it_listens_leaves_no_directory(
    number: signal.Signals, when: str, tmp_path: Path
) -> None:
    up = subprocess.run(
        [sys.executable, "-c", SIGNALLED_UP.format(when=when), str(int(number))],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (up.returncode, up.stderr) == (128 + number, "")
    assert list(tmp_path.iterdir()) == []
