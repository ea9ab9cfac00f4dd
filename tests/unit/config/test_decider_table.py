"""A new decider is a class with its thresholds and one line in the table; nothing else has to know it."""

from __future__ import annotations

import subprocess
import sys

from tests.support.deployments import ROOT
from trtllm_disagg.config.deciders import BY_OCCUPANCY, DECIDERS

PROGRAM = """
import argparse
import asyncio
import tempfile
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
from trtllm_disagg.handlers.services import LiveState
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
        assert "--toy-divisor: 0 is not allowed; expected a whole number" in str(error), error
    else:
        raise AssertionError("0 was taken")

def by_policy_file():
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("toy_divisor: 7")
        file.flush()
        live = LiveState.of(parse_worker_args([*ARGV, "--policy-file", file.name], {}), 4)
    assert live.thresholds.value.values["toy_divisor"] == 7

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
by_policy_file()
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
