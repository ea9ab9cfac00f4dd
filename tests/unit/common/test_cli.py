"""The command line: what it says to a wrong word, and with which exit status it ends."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.tracing import write
from trtllm_disagg import INSTALL_DYNAMO
from trtllm_disagg.common.cli import COMMANDS, Command, _command_that_installs, main, parser_of
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tracing.spans import SpanData


def status_of(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A command `try` that runs what a test sets."""
    module = SimpleNamespace(
        add_arguments=lambda parser: parser.add_argument("--level", type=int), run=lambda namespace: 0
    )
    monkeypatch.setitem(COMMANDS, "try", Command("a test", "a_module_of_a_test", "trtllm-disagg try"))
    monkeypatch.setitem(sys.modules, "a_module_of_a_test", module)
    return module


def test_python_m_trtllm_disagg_worker_starts_a_worker() -> None:
    command = [sys.executable, "-m", "trtllm_disagg.worker", "--model", "m", "--modality", "image"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --modality: 'image' is not allowed")


# -- help


@pytest.mark.parametrize(("name", "command"), COMMANDS.items())
def test_every_command_shows_its_flags_and_an_example_that_it_takes(
    name: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(name, "--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: trtllm-disagg {name} ")
    assert shown.endswith(f"example:\n  {command.example}\n")

    program, used, *arguments = shlex.split(command.example)
    assert (program, used) == ("trtllm-disagg", name)
    parser = parser_of(name, COMMANDS[name])
    import_module(COMMANDS[name].module).add_arguments(parser)
    assert parser.parse_known_args(arguments)[1] == []


# -- no command


def test_command_line_without_a_command_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of() == 2
    assert "usage: trtllm-disagg COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("wroker", "did you mean worker?"),
        ("demo-modle", "did you mean demo-model?"),
        ("xyzzy", "one of worker"),
    ],
)
def test_an_unknown_command_is_refused_with_the_likeliest_ones(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(word) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: command: {word!r} is not allowed; expected one of worker, ")
    assert hint in message
    assert ("did you mean" in message) == hint.startswith("did")


def test_bench_is_refused_with_the_place_of_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("bench", "overhead", "--quick") == 2
    assert "bench is gone since 0.3: a checkout has the benchmarks" in capsys.readouterr().err


# -- one command


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["worker", "--modell", "m"], "unknown flag --modell; did you mean --model?"),
        (["up", "--stratgy", "decode_first"], "unknown flag --stratgy; did you mean --strategy?"),
        (["worker", "--engin=embedded"], "unknown flag --engin; did you mean --engine?"),
        (["worker", "--model", "m", "--strategy", "x"], "unknown flag --strategy"),
        (["worker", "--mod", "m"], "unknown flag --mod"),
        (["up", "--strategy", "prefil_first"], "router, auto (did you mean prefill_first?)"),
        (["worker", "--qqqqqq"], "unknown flag --qqqqqq; --help lists the flags"),
        (["up", "--http-port", "x"], "argument --http-port: 'x' is not allowed; expected an integer"),
        (["up", "--stop-timeout", "x"], "argument --stop-timeout: 'x' is not allowed; expected a number"),
        (["worker", "--admin-routes=on"], "--no-admin-routes: 'on' is not allowed; expected no value"),
        (["completion", "basch"], "shell: 'basch' is not allowed; expected one of bash, zsh, tcsh (did"),
        (["worker", "surplus"], "unknown argument surplus"),
        (["worker", "--trtllm.max_batch_size"], "--trtllm.max_batch_size needs a value"),
        (["demo-model", "somewhere", "--forse"], "unknown flag --forse"),
        (["up", "--strategy", "agg", "--model", "m", "--http-prot", "1"], "did you mean --http-port?"),
        (["demo", "--max-tokens", "0"], "--max-tokens: '0' is not allowed; expected a number from 1"),
        (["switch", "--to", "auto", "--timeout", "nan"], "--timeout: 'nan' is not allowed; expected"),
        (["doctor", "--url", "http://h", "--timeout", "-1"], "argument --timeout: '-1' is not allowed"),
        (["worker"], "--model is missing; give it, or set TRTLLM_DISAGG_MODEL"),
    ],
)
def test_a_wrong_flag_is_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1, 3])
def test_the_commands_status_is_the_exit_status(command: Any, status: int) -> None:
    command.run = lambda namespace: status
    assert status_of("try") == status


@pytest.mark.parametrize("flag", ["--worker-args", "--frontend-args"])
@pytest.mark.parametrize("words", ["--publish-kv-events", "--next-router kv", "-v"])
def test_flag_value_that_begins_with_dashes_is_accepted(flag: str, words: str, command: Any) -> None:
    """argparse would take that for a flag of its own, and say that a value is missing."""
    command.add_arguments = lambda parser: parser.add_argument(flag, dest="given")
    command.run = lambda namespace: int(namespace.given != words)
    assert status_of("try", flag, words) == 0


def test_a_wrong_setting_is_one_line_and_status_2(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(namespace: Any) -> int:
        raise ConfigError.bad_value("--level", 9, "less")

    command.run = refuse
    assert status_of("try") == 2
    assert capsys.readouterr().err == "error: --level: 9 is not allowed; expected less\n"


@pytest.mark.parametrize(
    "words",
    ["worker --model m --engine recording", "switch --to prefill_first", "set --max-queued-requests 4"],
)
def test_a_command_without_dynamo_names_the_command_that_installs_it(words: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    (key := tmp_path / "key").touch(mode=0o600)
    key.write_bytes(bytes(32))
    without = "import sys; sys.modules['dynamo'] = None; from trtllm_disagg.common.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", without, *words.split()],
        cwd=tmp_path,
        env={**os.environ, "TRTLLM_DISAGG_ADMIN_KEY_FILE": str(key)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = rf"error: dynamo\S* is not installed in {sys.prefix}; {INSTALL_DYNAMO} brings it\n"
    assert re.fullmatch(said, done.stderr)
    assert done.returncode == ExitCode.WRONG_SETTING


@pytest.mark.parametrize(("name", "extra"), [("plan", "modelled"), ("demo-model", "embedded")])
def test_a_missing_package_names_the_extra_of_the_command(name: str, extra: str) -> None:
    assert _command_that_installs("numpy.linalg", name) == f"pip install 'trtllm-disagg[{extra}]'"


def test_a_wrong_level_of_the_log_is_one_line_and_status_2(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTLLM_DISAGG_LOG", "verbose")
    assert status_of("try") == 2
    assert "error: TRTLLM_DISAGG_LOG: 'verbose' is not allowed; expected one of " in capsys.readouterr().err


def test_an_empty_level_of_the_log_is_the_default(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_DISAGG_LOG", "")
    command.run = lambda namespace: 0
    assert status_of("try") == 0


def test_ctrl_c_while_python_makes_a_class_is_status_130(command: Any) -> None:
    """As during the imports of a command: up to 3.11 Python wraps what a descriptor's `__set_name__` raises."""

    class Interrupted:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    def interrupt(namespace: Any) -> int:
        type("Made", (), {"field": Interrupted()})
        return 0

    command.run = interrupt
    assert status_of("try") == 130


def test_a_runtime_error_is_no_interruption(command: Any) -> None:
    def fail(namespace: Any) -> int:
        raise RuntimeError("a bug") from ValueError()

    command.run = fail
    with pytest.raises(RuntimeError, match="a bug"):
        status_of("try")


INTERRUPTED_IMPORTS = """
import sys
class Imports:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "trtllm_disagg.common.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Imports)
from {module} import {function}
{function}()
"""


def test_ctrl_c_during_the_imports_of_the_installed_command_is_status_130_without_a_traceback() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    module, function = pyproject["project"]["scripts"]["trtllm-disagg"].split(":")
    program = INTERRUPTED_IMPORTS.format(module=module, function=function)
    interrupted = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (interrupted.returncode, interrupted.stderr) == (130, "")


def test_trace_draws_with_ascii_where_the_encoding_lacks_bars(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    write(file, [SpanData("request", "1" * 32, "2" * 16, None, 0, 5_000_000, {"gen_ai.request.id": "one"})])
    command = [sys.executable, "-P", "-m", "trtllm_disagg", "trace", "--otlp-file", str(file)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONIOENCODING": "iso-8859-1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "######" in done.stdout
