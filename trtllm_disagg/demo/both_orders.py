"""What `trtllm-disagg demo` does: a deployment an order, one question, and what each worker did meanwhile."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from trtllm_disagg.console import Console
from trtllm_disagg.demo.chat import Answer, WrappedText, stream_chat
from trtllm_disagg.demo_model.build import build_demo_model
from trtllm_disagg.demo_model.recipe import DEFAULT_DIRECTORY
from trtllm_disagg.deployment import (
    Deployment,
    DeploymentConfig,
    deployment_in_background,
)
from trtllm_disagg.deployment.run_dir import scratch_directory
from trtllm_disagg.deployment.status import status_for
from trtllm_disagg.deployment.up_command import default_name, engine_configs_in
from trtllm_disagg.exit_codes import ExitCode
from trtllm_disagg.model_directory import is_hub_name, servable_model
from trtllm_disagg.strategies import StrategySpec, orders
from trtllm_disagg.tracing.reading import Trace, read_traces
from trtllm_disagg.tracing.waterfall import duration, waterfall

_TRACE_SECONDS = 5.0
#: The wall clock is looked at twice for one moment.
_CLOCK_NS = 1_000_000
_INDENT = "   "


def show_both_orders(args: argparse.Namespace) -> ExitCode:
    """The exit status: 0 when both orders answered, and answered the same."""
    path = Path(args.model)
    if not is_hub_name(args.model) and (args.model == DEFAULT_DIRECTORY or not path.exists()):
        _say(f"1. The model: {path}, trained here on Python's documentation")
        build_demo_model(path)
    else:
        _say(f"1. The model: {args.model}")
    model = servable_model(args.model)
    answers = [_one_order(number, order, model, args) for number, order in enumerate(orders(), 2)]
    same = len({answer.text for answer in answers}) == 1
    _say("Both orders gave the same answer." if same else "The two orders gave DIFFERENT answers: a bug.")
    return ExitCode.DONE if same else ExitCode.FAILED


def _one_order(number: int, order: StrategySpec, model: Path, args: argparse.Namespace) -> Answer:
    _say(f"{number}. {order.name}: the frontend sends the request to the {order.entry_role} worker first")
    with scratch_directory("trtllm-disagg-demo-") as scratch:
        return _ask(scratch.path, order.name, model, args)


def _ask(run_dir: Path, order: str, model: Path, args: argparse.Namespace) -> Answer:
    columns = shutil.get_terminal_size().columns
    config = DeploymentConfig(
        strategy=order,
        model=str(model),
        served_model_name=default_name(args.model),
        run_dir=run_dir,
        http_port=0,
        engine="embedded",
        engine_configs=engine_configs_in(args.engine_configs, order) if args.engine_configs.is_dir() else {},
    )
    with deployment_in_background(config, status_for(sys.stderr)) as deployment:
        # The first request also connects the two engines; show an ordinary one.
        stream_chat(deployment.base_url, config.served_model_name, "Hello", max_tokens=2)
        print(f"\n   > {args.question}")
        text = WrappedText(sys.stdout, columns, _INDENT)
        answer = stream_chat(
            deployment.base_url,
            config.served_model_name,
            args.question,
            max_tokens=args.max_tokens,
            on_text=text.write,
        )
        text.end()
        print()
        _draw(_trace(deployment, answer), columns)
        first = duration((answer.first_text - answer.sent) * 1000)
        print(f"{_INDENT}first token at the client after {first}\n", flush=True)
    return answer


def _trace(deployment: Deployment, answer: Answer) -> Trace | None:
    """Both workers write their spans when they are done, a moment after the client; None if they do not."""
    deadline = time.monotonic() + _TRACE_SECONDS
    while time.monotonic() < deadline:
        for trace in read_traces(deployment.run_dir):
            if (
                trace.start >= answer.sent * 1e9 - _CLOCK_NS
                and len({node.worker for node in trace.nodes}) == 2
            ):
                return trace
        time.sleep(0.02)
    return None


def _draw(trace: Trace | None, columns: int) -> None:
    console = Console(soft_wrap=True)
    for line in () if trace is None else waterfall(trace, columns - len(_INDENT)):
        console.print(_INDENT, line, sep="")


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)
