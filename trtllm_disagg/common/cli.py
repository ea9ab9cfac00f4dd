"""The command `trtllm-disagg`. Each subcommand is a module, imported only when used."""

from __future__ import annotations

import argparse
import codecs
import difflib
import io
import itertools
import logging
import os
import re
import select
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from trtllm_disagg import INSTALL_DYNAMO, __version__
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.errors import ERROR_PREFIX, ConfigError, DisaggError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

log = logging.getLogger(__name__)


class Command(NamedTuple):
    """`module` has add_arguments(parser) and run(namespace) -> ExitCode, and may have prepare(arguments)."""

    help: str
    module: str
    example: str

    def described(self) -> dict[str, Any]:
        """The keyword arguments of argparse's `add_parser`."""
        return {
            "help": self.help,
            "description": self.help,
            "epilog": shown_example(self),
            "formatter_class": argparse.RawDescriptionHelpFormatter,
            "allow_abbrev": False,
        }


COMMANDS = {
    "worker": Command(
        "run one worker; flags as in `python -m dynamo.trtllm`",
        "trtllm_disagg.worker.worker_command",
        "trtllm-disagg worker --model .cache/demo-model --disaggregation-mode agg --engine embedded",
    ),
    "up": Command(
        "run a deployment on this machine: frontend and workers",
        "trtllm_disagg.tools.up.up_command",
        "trtllm-disagg up --strategy decode_first --model .cache/demo-model --http-port 8000",
    ),
    "switch": Command(
        "change the order of a running deployment",
        "trtllm_disagg.tools.admin.switch_command",
        "trtllm-disagg switch --run-dir DIR --to prefill_first",
    ),
    "flip": Command(
        "change a running worker's role, prefill or decode, without reloading its engine",
        "trtllm_disagg.tools.admin.flip_command",
        "trtllm-disagg flip --run-dir DIR --instance 1a2b3c --to decode",
    ),
    "set": Command(
        "change thresholds in a running deployment",
        "trtllm_disagg.tools.admin.set_command",
        "trtllm-disagg set --run-dir DIR --max-local-prefill-length 500",
    ),
    "scale": Command(
        "change the number of workers of a running `up`",
        "trtllm_disagg.tools.admin.scale_command",
        "trtllm-disagg scale --run-dir DIR --prefill 2 --decode 3",
    ),
    "autoscale": Command(
        "start, stop and flip workers of a running deployment as its load changes",
        "trtllm_disagg.tools.admin.autoscale_command",
        "trtllm-disagg autoscale --run-dir DIR --slo ttft=500,tpot=30 --max-workers 8",
    ),
    "rollout": Command(
        "replace running workers by a new revision, without a gap",
        "trtllm_disagg.tools.admin.rollout_command",
        "trtllm-disagg rollout --run-dir DIR --to v2 --model DIR",
    ),
    "plan": Command(
        "simulate which layout and order suit a model, GPUs, traffic and limits",
        "trtllm_disagg.tools.plan",
        "trtllm-disagg plan --model llama-3.3-70b-fp8 --gpus 8 --workloads 2048:300 --slo ttft=500,tpot=30",
    ),
    "doctor": Command(
        "check this machine, a pair of engine files, or a running deployment",
        "trtllm_disagg.tools.doctor",
        "trtllm-disagg doctor engine_configs/llama-3.1-8b/prefill.yaml engine_configs/llama-3.1-8b/decode.yaml",
    ),
    "trace": Command(
        "show where a request's time went",
        "trtllm_disagg.tools.trace",
        "trtllm-disagg trace --run-dir DIR --slowest 3",
    ),
    "top": Command(
        "watch a running deployment: workers, load and events",
        "trtllm_disagg.tools.top",
        "trtllm-disagg top --run-dir DIR",
    ),
    "demo": Command(
        "show one request in both orders",
        "trtllm_disagg.tools.demo",
        'trtllm-disagg demo --question "What is a list?"',
    ),
    "demo-model": Command(
        "train a small model locally, without a download",
        "trtllm_disagg.engines.demo_model",
        "trtllm-disagg demo-model .cache/demo-model",
    ),
    "completion": Command(
        "print a shell's completion script",
        "trtllm_disagg.tools.completion",
        "trtllm-disagg completion bash",
    ),
}


#: The variable for every command's log level on stderr.
_LOG_LEVEL = "TRTLLM_DISAGG_LOG"
#: argparse's errors -> this command's.
_REWORDED = {
    "invalid int value: (.*)": r"\1 is not allowed; expected an integer",
    "invalid float value: (.*)": r"\1 is not allowed; expected a number",
    "ignored explicit argument (.*)": r"\1 is not allowed; expected no value",
}
#: argparse's error for a bad choice.
_NOT_A_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)")
#: argparse's error for missing flags.
_MISSING_FLAGS = re.compile("the following arguments are required: .*--")


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for wrong arguments, as all of a command does."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = args or ()
        return super().parse_known_args(args, namespace)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        # argparse ignores a broken pipe, for which `main` needs its exit code.
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        if _MISSING_FLAGS.match(message):
            self._refuse_misspelt_flag()
        if no := _NOT_A_CHOICE.fullmatch(message):
            choices = no[3].replace("'", "").split(", ")
            raise ConfigError.bad_value(no[1], no[2], f"one of {', '.join(choices)}{_hint(no[2], choices)}")
        for theirs, ours in _REWORDED.items():
            message = re.sub(theirs, ours, message)
        raise ConfigError(f"{message} (`{self.prog} --help` lists the flags)")

    def _refuse_misspelt_flag(self) -> None:
        """argparse reports a missing flag first, even if an unknown flag is that one, misspelt."""
        known = {option for action in actions_of(self) for option in action.option_strings}
        flags = itertools.takewhile(lambda word: word != "--", self._words)
        unknown = [flag for flag in flags if flag.startswith("--") and flag.partition("=")[0] not in known]
        refuse_unknown_arguments(self, unknown)


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """A parser's actions, one per flag; argparse has no public name for them."""
    return parser._actions


def refuse_unknown_arguments(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Raises ConfigError for the first unknown argument, with the closest flag."""
    if not unknown:
        return
    name = unknown[0].split("=", 1)[0]
    known = [option for action in actions_of(parser) for option in action.option_strings]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else "; --help lists the flags"
    raise ConfigError(f"unknown {'flag' if name.startswith('-') else 'argument'} {name}{hint}")


#: Replaces bars and lines that the locale lacks; other characters become escapes.
_PLAIN = {**dict.fromkeys("▏▎▍▌▋▊▉", "|"), "█": "#", "─": "-"}


def _in_plain_characters(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError):
        bad = error.object[error.start : error.end]
        if all(character in _PLAIN for character in bad):
            return "".join(_PLAIN[character] for character in bad), error.end
    return codecs.backslashreplace_errors(error)


def _replace_unprintable_characters() -> None:
    """Replace characters that the locale lacks, which would end a command with a traceback."""
    codecs.register_error("plain_characters", _in_plain_characters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="plain_characters")


def _open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream (`>&-`): the next file or socket would get its number."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def main(argv: Sequence[str] | None = None) -> None:
    """Exit with an `ExitCode`. Errors are one sentence, without a traceback."""
    _open_closed_streams()
    _replace_unprintable_characters()
    try:
        try:
            _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            # Flush here: at the interpreter's end Python would print an error for a broken pipe.
            sys.stdout.flush()
    except BrokenPipeError:
        if not (left := _streams_without_reader()):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in left:
            os.dup2(nowhere, descriptor)
        sys.exit(ExitCode.READER_LEFT)


def _main(argv: list[str]) -> NoReturn:
    try:
        sys.exit(run(argv))
    except (DisaggError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _streams_without_reader():
            raise
        log.debug("where it failed", exc_info=True)
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        print(f"{ERROR_PREFIX}{text}", file=sys.stderr)
        sys.exit(ExitCode.WRONG_SETTING if isinstance(error, ConfigError) else ExitCode.FAILED)
    except ModuleNotFoundError as error:
        if (command := _command_that_installs(error.name, argv[0])) is None:
            raise
        missing = f"{error.name} is not installed in {sys.prefix}; {command} brings it"
        print(f"{ERROR_PREFIX}{missing}", file=sys.stderr)
        sys.exit(ExitCode.WRONG_SETTING)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except RuntimeError as error:
        # Python 3.11 wraps errors raised while a class is created, as during a command's imports.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        sys.exit(ExitCode.INTERRUPTED)


def _streams_without_reader() -> list[int]:
    """The descriptors of stdout and stderr with a pipe or socket that has no reader."""
    streams = select.poll()
    for descriptor in (1, 2):
        # poll() reports errors without being asked to.
        streams.register(descriptor, 0)
    return [descriptor for descriptor, event in streams.poll(0) if event & (select.POLLERR | select.POLLHUP)]


#: Needed only by the embedded engine. TensorRT-LLM pins some, so this package does not require them.
_OF_EMBEDDED = "torch transformers tokenizers safetensors numpy numba llguidance tqdm PIL"

#: Needed by every command; a Python outside the installation lacks them.
_OF_ALL = "aiohttp msgspec nats prometheus_client psutil pydantic rich uvloop yaml zmq"


def _command_that_installs(module: str | None, command: str) -> str | None:
    """The command for a package that is missing here; None for unknown packages."""
    package = (module or "").partition(".")[0]
    if package in _OF_EMBEDDED.split():
        # The simulation runs no model, so it needs no torch.
        return f"pip install 'trtllm-disagg[{'modelled' if command == 'plan' else 'embedded'}]'"
    if package == "dynamo":
        return INSTALL_DYNAMO
    return "pip install trtllm-disagg" if package in _OF_ALL.split() else None


def run(argv: list[str]) -> ExitCode:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return ExitCode.DONE if argv else ExitCode.WRONG_SETTING
    if argv[0] == "--version":
        print(__version__)
        return ExitCode.DONE
    module, namespace = parsed(*argv)
    _log_to_stderr()
    status: ExitCode = module.run(namespace)
    return status


def parsed(name: str, *arguments: str) -> tuple[Any, argparse.Namespace]:
    """A command's module and arguments. Raises ConfigError for wrong ones."""
    command = _command(name)
    module = import_module(command.module)
    parser = parser_of(name, command)
    module.add_arguments(parser)
    prepare = getattr(module, "prepare", list)
    namespace, unknown = parser.parse_known_args(prepare(_with_values([*arguments])))
    if unknown:
        refuse_unknown_arguments(parser, unknown)
    return module, namespace


def parser_of(name: str, command: Command) -> Parser:
    """A command's parser, to which its module adds the flags."""
    options = command.described()
    del options["help"]
    return Parser(prog=f"trtllm-disagg {name}", **options)


def shown_example(command: Command) -> str:
    return f"example:\n  {command.example}"


def _with_values(arguments: list[str]) -> list[str]:
    """`--worker-args '--flag'` as `--worker-args=--flag`: argparse would parse the value as a flag."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in TAKE_FLAGS:
            joined[-1] += "=" + argument
        else:
            joined.append(argument)
    return joined


#: All commands' flags that take flags of another program.
TAKE_FLAGS = ("--worker-args", "--frontend-args", "--prefill-flags", "--decode-flags", "--autoscale")


#: Commands of earlier versions -> what to use instead.
_REPLACED = {
    "bench": "since 0.3: a checkout has the benchmarks, `python -m benchmarks.overhead` (docs/how-to/benchmark.md)"
}


def _command(name: str) -> Command:
    if name in _REPLACED:
        raise ConfigError(f"the command {name} is gone {_REPLACED[name]}")
    if name not in COMMANDS:
        raise ConfigError.bad_value("command", name, f"one of {', '.join(COMMANDS)}{_hint(name, COMMANDS)}")
    return COMMANDS[name]


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
    help = "trtllm-disagg COMMAND --help lists the flags of a command."
    return f"usage: trtllm-disagg COMMAND ...\n\n{lines}\n\n{help}\n\n{shown_example(COMMANDS['up'])}"


def _log_to_stderr() -> None:
    level = (os.environ.get(_LOG_LEVEL) or "INFO").upper()
    if level not in (known := logging.getLevelNamesMapping()):
        raise ConfigError.bad_value(_LOG_LEVEL, os.environ[_LOG_LEVEL], f"one of {', '.join(known)}")
    logging.basicConfig(
        level=level,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
