"""`--help`: at once, for every command and flag; and the same for a shell that completes them."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import pytest

from trtllm_disagg.cli import COMMANDS, main
from trtllm_disagg.config.args import actions_of
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.tools.completion import SHELLS, parsers_of, whole_parser

#: Each takes longer to load than all that `--help` needs.
LIBRARIES = (
    *(
        "dynamo",
        "huggingface_hub",
        "numpy",
        "prometheus_client",
        "pydantic",
        "rich",
        "tensorrt_llm",
    ),
    *("tokenizers", "torch", "transformers", "uvloop", "zmq"),
)
LOADED = f"""
import sys
from trtllm_disagg.tools.completion import whole_parser
whole_parser().format_help()
print(*sorted(set({LIBRARIES}) & set(sys.modules)))
"""


def test_no_help_loads_a_library_that_only_the_work_needs() -> None:
    ended = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("\n", "")


PARSERS = list(parsers_of(whole_parser()))[1:]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog.partition(" ")[2])
def test_every_command_and_every_flag_is_described(parser: argparse.ArgumentParser) -> None:
    assert parser.description
    assert parser.epilog is not None
    assert re.fullmatch(r"example:\n  trtllm-disagg .+", parser.epilog)
    for action in actions_of(parser):
        told = re.sub(r"\(default: .*", "", action.help or "").strip()
        assert (action.help or "").count("(default:") <= 1
        assert told, f"{action.option_strings or action.dest}: only a default, or nothing"
    assert "(default: [" not in parser.format_help(), "a default is shown as it is given: no Python list"


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_command_and_a_flag_of_each(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["completion", shell])
    assert caught.value.code == ExitCode.DONE
    script = capsys.readouterr().out
    for name in COMMANDS:
        assert name in script
    for flag in ("disaggregation-mode", "max-local-prefill-length", "perfetto", "once"):
        assert flag in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
