"""A new engine is a module with the LLM API and one line in the table; nothing else has to know it."""

from __future__ import annotations

import subprocess
import sys

from tests.support.deployments import ROOT

PROGRAM = """
from trtllm_disagg.engine.engines import ENGINES, EngineSpec
ENGINES["toy"] = EngineSpec("toy", "trtllm_disagg.engines.recording.llm", defaults={"max_batch_size": 3})

from tests.support.worker_args import parse_worker_args
from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.engine.llm_api import load_api, serve_as_rank
from trtllm_disagg.engine.engines import resolve_engine
from trtllm_disagg.engines.recording import llm as recording

config = parse_worker_args(["--model", "org/model", "--engine", "toy"], {})
assert resolve_engine(config.engine) == "toy"
args = build_engine_args(config)
assert args["max_batch_size"] == 3
given = parse_worker_args(["--model", "org/model", "--engine", "toy", "--max-batch-size", "5"], {})
assert build_engine_args(given)["max_batch_size"] == 5
assert not serve_as_rank("toy", args)
assert load_api("toy").llm is recording.LLM
print("all know it")
"""


def test_a_toy_engine_needs_its_module_and_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("all know it\n", "", 0)
