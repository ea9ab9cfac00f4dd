"""The command `trtllm-disagg`. Each subcommand is a module, imported only when the subcommand is used."""

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
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from trtllm_disagg import INSTALL_DYNAMO, __version__
from trtllm_disagg.errors import ERROR_PREFIX, ConfigError, DisaggError
from trtllm_disagg.processes.exits import ExitCode

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
        "run one worker; its flags are named as in `python -m dynamo.trtllm`",
        "trtllm_disagg.worker.worker_command",
        "trtllm-disagg worker --model .cache/demo-model --disaggregation-mode agg --engine embedded",
    ),
    "up": Command(
        "run a whole deployment on this machine",
        "trtllm_disagg.tools.up.up_command",
        "trtllm-disagg up --strategy decode_first --model .cache/demo-model --http-port 8000",
    ),
    "switch": Command(
        "change the order of the stages in a running deployment",
        "trtllm_disagg.tools.admin.switch_command",
        "trtllm-disagg switch --run-dir DIR --to prefill_first",
    ),
    "flip": Command(
        "change the role of a running worker, prefill or decode, without loading its engine again",
        "trtllm_disagg.tools.admin.flip_command",
        "trtllm-disagg flip --run-dir DIR --instance 1a2b3c --to decode",
    ),
    "set": Command(
        "change thresholds of a running deployment",
        "trtllm_disagg.tools.admin.set_command",
        "trtllm-disagg set --run-dir DIR --max-local-prefill-length 500",
    ),
    "scale": Command(
        "change the number of workers of a running `up`",
        "trtllm_disagg.tools.admin.scale_command",
        "trtllm-disagg scale --run-dir DIR --prefill 2 --decode 3",
    ),
    "autoscale": Command(
        "keep the numbers of workers of a running `up` right as its load changes",
        "trtllm_disagg.tools.admin.autoscale_command",
        "trtllm-disagg autoscale --run-dir DIR --slo ttft=500,tpot=30 --most 8",
    ),
    "rollout": Command(
        "replace the workers of a running deployment by those of another revision",
        "trtllm_disagg.tools.admin.rollout_command",
        "trtllm-disagg rollout --run-dir DIR --to v2 --model DIR",
    ),
    "plan": Command(
        "simulate in seconds which layout of modelled GPUs suits a model, traffic and limits",
        "trtllm_disagg.tools.plan",
        "trtllm-disagg plan --model .cache/demo-model --workloads rag --workers 4 --slo ttft=500,tpot=30",
    ),
    "doctor": Command(
        "check the engine files of a prefill and a decode worker, or a deployment that serves",
        "trtllm_disagg.tools.doctor",
        "trtllm-disagg doctor engine_configs/llama-3.1-8b/prefill.yaml engine_configs/llama-3.1-8b/decode.yaml",
    ),
    "trace": Command(
        "show where the time of a request went",
        "trtllm_disagg.tools.trace",
        "trtllm-disagg trace --run-dir DIR --slowest 3",
    ),
    "bench": Command(
        "measure on this machine, beside baselines",
        "trtllm_disagg.tools.bench",
        "trtllm-disagg bench overhead --quick",
    ),
    "top": Command(
        "show a running deployment: its workers, their load, and what happens",
        "trtllm_disagg.tools.top",
        "trtllm-disagg top --run-dir DIR",
    ),
    "demo": Command(
        "show how one request passes through both orders",
        "trtllm_disagg.tools.demo",
        'trtllm-disagg demo --question "What is a list?"',
    ),
    "demo-model": Command(
        "train the small local model; nothing is downloaded",
        "trtllm_disagg.engines.demo_model",
        "trtllm-disagg demo-model .cache/demo-model",
    ),
    "completion": Command(
        "print the completion script of a shell",
        "trtllm_disagg.tools.completion",
        "trtllm-disagg completion bash",
    ),
}


#: The variable for the level of the log on stderr, of every command.
_LOG_LEVEL = "TRTLLM_DISAGG_LOG"
#: argparse's error for a value that is no number.
_NOT_A_NUMBER = re.compile(r"invalid (int|float) value: (.*)")
#: argparse's error for flags that are missing.
_MISSING_FLAGS = re.compile("the following arguments are required: .*--")
_KINDS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for wrong arguments, as every other part of a command does."""

    #: Flags of earlier versions: what to use instead. A command's module sets it.
    replaced: Mapping[str, str] = {}
    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = args or ()
        return super().parse_known_args(args, namespace)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        # argparse ignores a broken pipe, which `main` has to turn into its exit code.
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        if _MISSING_FLAGS.match(message):
            self._refuse_misspelt_flag()
        complaint = _NOT_A_NUMBER.sub(lambda no: f"{no[2]} is not allowed; expected {_KINDS[no[1]]}", message)
        raise ConfigError(f"{complaint} (`{self.prog} --help` lists the flags)")

    def _refuse_misspelt_flag(self) -> None:
        """argparse reports a missing flag before one that it does not know, which may be the missing one."""
        from trtllm_disagg.config.args import actions_of, refuse_unknown_arguments

        known = {option for action in actions_of(self) for option in action.option_strings}
        flags = itertools.takewhile(lambda word: word != "--", self._words)
        unknown = [flag for flag in flags if flag.startswith("--") and flag.partition("=")[0] not in known]
        refuse_unknown_arguments(self, unknown)


#: Replacements for the characters of bars and lines that the locale lacks; other characters become escapes.
_PLAIN = {**dict.fromkeys("▏▎▍▌▋▊▉", "|"), "█": "#", "─": "-"}


def _in_plain_characters(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError):
        bad = error.object[error.start : error.end]
        if all(character in _PLAIN for character in bad):
            return "".join(_PLAIN[character] for character in bad), error.end
    return codecs.backslashreplace_errors(error)


def _replace_unprintable_characters() -> None:
    """Replace characters that the locale lacks, which would otherwise end a command with a traceback."""
    codecs.register_error("plain_characters", _in_plain_characters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="plain_characters")


def _open_closed_streams() -> None:
    """/dev/null for each standard stream that is closed (`>&-`): the next file or socket would get its number."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with an `ExitCode`. Errors are shown as one sentence, without a traceback."""
    _open_closed_streams()
    _replace_unprintable_characters()
    try:
        try:
            _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            # Here a broken pipe can be handled; at the interpreter's end Python would print an error.
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
        if (command := _command_that_installs(error.name)) is None:
            raise
        print(
            f"{ERROR_PREFIX}{error.name} is not installed in {sys.prefix}; {command} brings it",
            file=sys.stderr,
        )
        sys.exit(ExitCode.WRONG_SETTING)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except RuntimeError as error:
        # Python 3.11 wraps what is raised while a class is made, as during the imports of a command.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        sys.exit(ExitCode.INTERRUPTED)


def _streams_without_reader() -> list[int]:
    """The descriptors of stdout and stderr that are pipes or sockets with a closed other end."""
    streams = select.poll()
    for descriptor in (1, 2):
        # poll() reports errors without being asked to.
        streams.register(descriptor, 0)
    return [descriptor for descriptor, event in streams.poll(0) if event & (select.POLLERR | select.POLLHUP)]


#: Needed by the embedded engine only. TensorRT-LLM pins some of them, so they are no dependencies of this package.
_OF_EMBEDDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "llguidance", "tqdm")

#: Needed by every command; another Python than that of the installation lacks them.
_OF_ALL = (
    "aiohttp",
    "msgspec",
    "nats",
    "prometheus_client",
    "psutil",
    "pydantic",
    "rich",
    "uvloop",
    "yaml",
    "zmq",
)


def _command_that_installs(module: str | None) -> str | None:
    """Of a package that was installed somewhere else, or not at all; None for any other."""
    package = (module or "").partition(".")[0]
    if package in _OF_EMBEDDED:
        return "pip install 'trtllm-disagg[embedded]'"
    if package == "dynamo":
        return INSTALL_DYNAMO
    return "pip install trtllm-disagg" if package in _OF_ALL else None


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
    """The module of a command, and its arguments. Raises ConfigError for wrong ones."""
    command = _command(name)
    module = import_module(command.module)
    parser = parser_of(name, command)
    module.add_arguments(parser)
    prepare = getattr(module, "prepare", list)
    namespace, unknown = parser.parse_known_args(prepare(_with_values([*arguments])))
    if unknown:
        from trtllm_disagg.config.args import refuse_unknown_arguments

        refuse_unknown_arguments(parser, unknown)
    return module, namespace


def parser_of(name: str, command: Command) -> Parser:
    """The parser of a command, to which its module adds the flags."""
    options = command.described()
    del options["help"]
    return Parser(prog=f"trtllm-disagg {name}", **options)


def shown_example(command: Command) -> str:
    return f"example:\n  {command.example}"


def _with_values(arguments: list[str]) -> list[str]:
    """`--worker-args '--flag'` as `--worker-args=--flag`: argparse would parse the value as a flag of its own."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in TAKE_FLAGS:
            joined[-1] += "=" + argument
        else:
            joined.append(argument)
    return joined


#: Flags that take the flags of another program as value, of all commands.
TAKE_FLAGS = ("--worker-args", "--frontend-args", "--prefill-flags", "--decode-flags", "--autoscale")


#: Commands of earlier versions: what to use instead.
_REPLACED = {"k8s": "deploy/k8s/ has the manifests, kubectl apply -k deploy/k8s/decode_first"}


def _command(name: str) -> Command:
    if name in _REPLACED:
        raise ConfigError(f"the command {name} is gone since 0.2: {_REPLACED[name]}")
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError.bad_value("command", name, f"one of {', '.join(COMMANDS)}{hint}")
    return COMMANDS[name]


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
