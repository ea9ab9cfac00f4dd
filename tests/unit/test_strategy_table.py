"""The list of strategies, and that nothing else has to know a new one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.deployments import ROOT
from trtllm_disagg.strategies import STRATEGIES, StrategySpec, disaggregated, main, orders, switchable

#: In a process of its own: the toy is registered before anything reads the table.
PROGRAM = """
import argparse, asyncio
from tests.support.toy_strategy import register
register()
from pathlib import Path
from tests.support.handling import collect, expected_tokens, raw_request, request, tokens_of
from trtllm_disagg.strategies import require_switchable
from trtllm_disagg.admin.commands import CONTROL, decode_command
from tests.support.worker_args import parse_worker_args
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.tools.up.plan import DeploymentConfig, plan, stop_order
from trtllm_disagg.tools.up.up_command import add_arguments
from trtllm_disagg.strategies import main
from tests.support.recording_pair import make_pair

argv = ["--model", "m", "--disaggregation-mode", "decode", "--disaggregation-strategy", "toy"]
config = parse_worker_args(argv, {})
assert config.is_first_stage and config.calls_second_stage and config.may_switch
assert not WorkerConfig(model="m", role="prefill", strategy="toy").is_first_stage

parser = argparse.ArgumentParser()
add_arguments(parser)
assert parser.parse_args(["--model", "m", "--strategy", "toy"]).strategy == "toy"
DeploymentConfig("toy", "m", "m", Path("run"), prefill_dispatch="queue")
assert stop_order("toy") == (("autoscale",), ("decode",), ("prefill",), ("frontend",), ("nats",))
assert main(["toy"]) == "decode prefill"

require_switchable("toy")
assert decode_command({"command": "switch", "to": "toy"}).to == "toy"

from tests.unit.tools.conftest import MODELLED
from trtllm_disagg.tools.plan.fleet import simulate
from trtllm_disagg.tools.plan.layouts import planned_layouts
from trtllm_disagg.tools.plan.simulation import ModelledWorker
from trtllm_disagg.tools.plan.workloads import BUILT_IN

gpu = ModelledWorker.of({"model": "m", "modelled": MODELLED})
planned = {layout.strategy: layout for layout in planned_layouts(2)}
asks = BUILT_IN["chat"].asks(4.0, 20)
# As its line says: decode workers get each request, call a prefill worker for it, and no request chooses its order.
points = {name: simulate(planned[name], dict.fromkeys(("prefill", "decode"), gpu), asks) for name in ("toy", "auto")}
assert planned["toy"].name == "1P1D toy"
assert (points["toy"].by_one_worker, points["toy"].moved > 0) == (0.0, True)
assert points["auto"].by_one_worker > 0.5

async def answers():
    pair = make_pair("toy")
    assert tokens_of(await collect(pair.generate, request())) == expected_tokens(5)
    assert pair.client.requests == [], "the toy answers alone"
    for other in ("prefill_first", "decode_first"):
        asked = request(annotations=["disagg:toy"])
        assert tokens_of(await collect(make_pair(other).generate, asked)) == expected_tokens(5)
        assert asked.trace.strategy == "toy"

asyncio.run(answers())
print("all know it")
"""


def test_a_toy_strategy_needs_its_file_and_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("all know it\n", "", 0)


@pytest.mark.parametrize("spec", STRATEGIES.values(), ids=STRATEGIES)
def test_every_role_stops_once_and_callers_stop_first(spec: StrategySpec) -> None:
    assert sorted(spec.stop_order) == sorted(spec.roles)
    assert spec.entry_role in (spec.stop_order[0], None)


def test_each_worker_has_an_order_that_it_takes_first() -> None:
    assert {order.entry_role for order in orders()} == {"prefill", "decode"}
    assert {order.name for order in orders()} < set(switchable())


def test_scripts_get_no_answer_for_a_strategy_that_is_unknown() -> None:
    with pytest.raises(SystemExit, match=f"expected one of {', '.join(disaggregated())}$"):
        main(["agg"])
