"""`trtllm-disagg switch`: changes the strategy of a serving deployment without failed requests: the new first stage
registers, the frontend finds it, then the old one stops (`reconcile`).
"""

from __future__ import annotations

import argparse
from typing import Any

from trtllm_disagg.admin.commands import Switch
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.strategies import require_switchable, switchable
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.fleet import add_frontend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Not `choices`: `require_switchable` explains a refusal.
    strategies = "{" + ",".join(switchable()) + "}"
    parser.add_argument("--to", required=True, metavar=strategies, help="new strategy")
    client.add_arguments(parser)
    add_frontend(parser)
    client.add_outcome(parser, 60.0, "for the change, and again for the old order's requests")


def run(args: argparse.Namespace) -> ExitCode:
    """Returns 0 when switched. Raises DisaggError (1) for a failure midway, ConfigError (2) for a wrong setting."""
    require_switchable(args.to)
    outcome = client.wish(args, Switch(args.to))
    return client.print_outcome(args, outcome, shown(outcome))


def shown(outcome: dict[str, Any]) -> str:
    model, strategy, left = outcome["model"], outcome["strategy"], outcome["requests_left"]
    if outcome["seconds"] is None:
        return f"{model} already runs {strategy}: {', '.join(outcome['first'])} first"
    more = f"; {left} requests still run on the old first stage" if left else ""
    return f"switched {model} to {strategy} in {outcome['seconds']:.1f} s{more}"
