"""`up` with small stand-ins for frontend and workers: it loads, reports, drains, and leaves nothing."""

import argparse
import asyncio
import io
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.stand_ins import Exits, StartUp, nothing_runs
from trtllm_disagg.common.exits import ONE_INTERRUPT_SECONDS
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.command_socket import COMMAND_SOCKET
from trtllm_disagg.tools.up.http import lists_model
from trtllm_disagg.tools.up.lifecycle import prepare, running_deployment, serve
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import LOOPBACK, DeploymentConfig, PortInUseError
from trtllm_disagg.tools.up.run_dir import is_alive
from trtllm_disagg.tools.up.status import Status
from trtllm_disagg.tools.up.up_command import add_arguments, run


async def test_ready_line_is_printed_once_when_all_processes_serve(start_up: StartUp) -> None:
    up = await start_up()

    line = await up.ready_line()

    records = up.records()
    port = records["frontend"].ports["http"]
    assert line == f"ready http://127.0.0.1:{port} model=toy strategy=decode_first\n"
    assert [record.state for record in records.values()] == ["ready"] * 3
    assert list(records) == ["frontend", "prefill-0", "decode-0"]
    assert all(is_alive(record) for record in records.values())
    assert await lists_model(LOOPBACK, port, "toy")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_drains_and_exits_with_0(start_up: StartUp, number: signal.Signals) -> None:
    up = await start_up()
    await up.ready_line()
    exits = Exits(up.all_pids())

    up.process.send_signal(number)

    assert await up.ends() == 0
    await exits.all_seen()
    assert {record.state for record in up.records().values()} == {"exited"}
    assert "killed" not in up.errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_during_load_stops_everything_and_is_the_exit_code(
    start_up: StartUp, number: signal.Signals
) -> None:
    up = await start_up(worker_args=("--unready-role", "prefill"))
    await up.says("decode-0 pid")

    up.process.send_signal(number)

    assert await up.ends() == 128 + number
    assert nothing_runs(up.run_dir)


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        ("prefill_first", ("prefill-0", "decode-0", "frontend")),
        ("decode_first", ("decode-0", "prefill-0", "frontend")),
        ("agg", ("agg-0", "frontend")),
    ],
)
async def test_a_called_worker_stops_after_its_callers(
    start_up: StartUp, strategy: str, order: tuple[str, ...]
) -> None:
    up = await start_up(strategy=strategy)
    await up.ready_line()

    up.process.terminate()
    assert await up.ends() == 0

    words = up.errors.split("stopping; interrupt again to kill at once")[1].split()
    stops = [(words[i - 2], word) for i, word in enumerate(words) if word in ("stopping", "exited")]
    assert stops == [(name, what) for name in order for what in ("stopping", "exited")]


async def test_a_death_before_ready_is_reported_and_ends_everything(start_up: StartUp) -> None:
    up = await start_up(worker_args=("--crash-role", "decode", "--unready-role", "prefill"))

    assert await up.ends() == 1
    (sentence,) = (line for line in up.errors.splitlines() if line.startswith("error: "))
    assert sentence.startswith(
        "error: decode-0 died before the deployment was ready: no such weights (exit code 3), pid "
    )
    assert "  the last line is not the cause\n" in up.errors
    assert nothing_runs(up.run_dir)


async def test_a_command_that_does_not_exist_is_reported(start_up: StartUp) -> None:
    up = await start_up(worker_command=("no-such-worker",))

    assert await up.ends() == 1
    assert "prefill-0 cannot be started" in up.errors
    assert nothing_runs(up.run_dir)


async def test_command_socket_exists_when_the_ready_line_is_printed(config: DeploymentConfig) -> None:
    class Terminal(io.StringIO):
        takes_commands = False

        def write(self, text: str) -> int:
            if text.startswith("ready "):
                self.takes_commands = (config.run_dir / COMMAND_SOCKET).is_socket()
                os.kill(os.getpid(), signal.SIGTERM)
            return super().write(text)

    with redirect_stdout(Terminal()) as terminal:
        assert await serve(config, Status()) == 0
    assert terminal.takes_commands


async def test_the_startup_timeout_names_the_late_process(start_up: StartUp) -> None:
    up = await start_up(worker_args=("--unready-role", "prefill"), startup_timeout=3.0)

    assert await up.ends() == 1
    assert "not ready after 3 s: prefill-0 (starting); --startup-timeout sets the limit\n" in up.errors
    assert f"{up.run_dir}/prefill-0.log): child" in up.errors
    assert nothing_runs(up.run_dir)


async def test_a_process_that_ignores_sigterm_is_killed_and_named(start_up: StartUp) -> None:
    up = await start_up(worker_args=("--stubborn-role", "prefill"), stop_timeout=2.0)
    await up.ready_line()
    exits = Exits(up.all_pids())

    up.process.terminate()

    assert await up.ends() == 1
    await exits.all_seen()
    assert "after the signal to stop, killed: prefill-0\n" in up.errors
    assert "frontend pid" in up.errors
    assert up.errors.count("exited (exit code 0)") == 2


async def test_the_second_interrupt_kills_at_once(start_up: StartUp) -> None:
    up = await start_up(worker_args=("--stubborn-role", "decode"), stop_timeout=600.0)
    await up.ready_line()
    exits = Exits(up.all_pids())

    up.process.send_signal(signal.SIGINT)
    await up.says("interrupt again to kill at once")
    # Sooner it would count as an echo of the first one.
    await asyncio.sleep(ONE_INTERRUPT_SECONDS + 0.05)
    up.process.send_signal(signal.SIGINT)

    assert await up.ends() == 1
    await exits.all_seen()


async def test_sigterm_and_sigint_at_once_are_one_clean_stop(start_up: StartUp) -> None:
    up = await start_up()
    await up.ready_line()
    exits = Exits(up.all_pids())

    # What `timeout` does: its child, then its process group.
    up.process.send_signal(signal.SIGTERM)
    up.process.send_signal(signal.SIGINT)

    assert await up.ends() == 0
    await exits.all_seen()


async def test_without_a_reader_of_stderr_a_signal_drains_and_exits_with_0(start_up: StartUp) -> None:
    up = await start_up(worker_args=("--detach-child",))
    await up.ready_line()
    exits = Exits(up.all_pids())
    up.stop_reading_stderr()

    up.process.terminate()

    assert await up.ends() == 0
    await exits.all_seen()
    assert all("leaves by SIGTERM" in up.log_of(name) for name in up.records())


@pytest.mark.parametrize("worker_args", [("--stubborn-role", "prefill"), ("--detach-child",)])
async def test_kill_9_of_up_leaves_no_orphan(start_up: StartUp, worker_args: tuple[str, ...]) -> None:
    up = await start_up(worker_args=worker_args)
    await up.ready_line()
    exits = Exits(up.all_pids())

    up.process.kill()

    await exits.all_seen()
    assert await up.ends() == -signal.SIGKILL


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    (model := tmp_path / "toy").mkdir()
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / file).write_text("{}")
    (model / "tokenizer_config.json").write_text('{"chat_template": ""}')
    with closing(socket.create_server((LOOPBACK, 0))) as taken:
        port = taken.getsockname()[1]
        flags = [
            "--strategy",
            "agg",
            "--model",
            str(model),
            "--http-port",
            str(port),
            "--run-dir",
            f"{tmp_path}/run",
        ]
        with pytest.raises(PortInUseError, match=f"--http-port: {port} .*already in use.; 0 takes any free"):
            run(parser.parse_args(flags))

    assert not (tmp_path / "run").exists()


async def test_gpus_that_are_refused_leave_the_run_directory_as_it_is(config: DeploymentConfig) -> None:
    async with running_deployment(config):
        (config.run_dir / "traces" / "decode-0.jsonl").touch()

    with pytest.raises(ConfigError, match="--gpus"):
        prepare(replace(config, engine="embedded", gpu_devices="0"), Status())

    assert (config.run_dir / "traces" / "decode-0.jsonl").exists()


class Showing(Status):
    """Notes which processes were told to stop while their reader saw what they do, and while it did not."""

    def __init__(self) -> None:
        self.is_shown = False
        self.stopping: dict[str, bool] = {}

    @asynccontextmanager
    async def showing(self, processes: Sequence[ManagedProcess]) -> AsyncIterator[None]:
        self.is_shown = True
        yield
        self.is_shown = False

    def changed(self, process: ManagedProcess) -> None:
        if process.state == "stopping":
            self.stopping[process.name] = self.is_shown


async def test_a_deployment_that_ends_with_its_block_is_shown_while_it_drains(
    config: DeploymentConfig,
) -> None:
    status = Showing()
    async with running_deployment(config, status):
        assert not status.is_shown
    assert status.stopping == {"frontend": True, "prefill-0": True, "decode-0": True}


async def test_a_deployment_is_gone_after_its_block_even_when_that_fails(config: DeploymentConfig) -> None:
    seen: list[ManagedProcess] = []

    async def fail_inside() -> None:
        async with running_deployment(config) as deployment:
            seen.extend(deployment.processes)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()

    assert [process.returncode for process in seen] == [0, 0, 0]
    assert nothing_runs(config.run_dir)
