"""A new decider is a function and one line in the table; nothing else has to know it."""

from __future__ import annotations

import subprocess
import sys

from tests.support.deployments import ROOT

PROGRAM = """
import asyncio
from trtllm_disagg.deciders import DECIDERS, Decision

def even_prompts_stay(facts, limits):
    return Decision(facts.num_prompt % 2 == 1, "parity")

DECIDERS["toy"] = even_prompts_stay

from tests.support.handling import collect, expected_tokens, request, tokens_of
from trtllm_disagg.config.args import parse_worker_args
from trtllm_disagg.testing.pair import make_pair

argv = ["--model", "m", "--disaggregation-mode", "decode", "--prefill-decider", "toy"]
assert parse_worker_args(argv, {}).reads_kv_events

async def answers():
    for tokens, way in (([11, 12], "local"), ([11, 12, 13], "decode_first")):
        pair, asked = make_pair("decode_first", prefill_decider="toy"), request(token_ids=tokens)
        assert await collect(pair.generate, asked)
        assert (asked.trace.strategy, asked.trace.reason) == (way, "parity")

asyncio.run(answers())
print("all know it")
"""


def test_a_toy_decider_needs_its_function_and_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("all know it\n", "", 0)
