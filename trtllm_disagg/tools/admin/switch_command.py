"""`trtllm-disagg switch`: changes the strategy of a deployment while it serves, without a failed request: the new first
stage registers, the frontend learns of it, then the old first stage leaves (`reconcile`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from trtllm_disagg.admin.commands import Switch
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.strategies import require_switchable, switchable
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.client import Workers, all_workers
from trtllm_disagg.tools.admin.fleet import Fleet, add_frontend, knows_by, require_key
from trtllm_disagg.tools.up.look import FirstStages, WhyNot
from trtllm_disagg.tools.up.reconcile import Phase, Seen, Wanted, check_switch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Not `choices`: `require_switchable` explains a refusal.
    strategies = "{" + ",".join(switchable()) + "}"
    parser.add_argument("--to", required=True, metavar=strategies, help="the strategy to run from now on")
    client.add_arguments(parser)
    add_frontend(parser)
    client.add_timeout(
        parser, 60.0, "until the order is changed, and again until the old one's requests have ended"
    )
    client.add_json(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Returns 0 when switched; raises a DisaggError (1) for a failure midway, ConfigError (2) for a wrong setting."""
    require_switchable(args.to)
    if args.run_dir is None:
        key = client.signer(args).key_id
        outcome = client.change_fleet(
            args, lambda workers: switch(workers, knows_by(args), args.to, args.timeout, client.say, key)
        )
    else:
        outcome = client.wish(args, Switch(args.to))
    print(json.dumps(outcome) if args.json else shown(outcome))
    return ExitCode.DONE


def shown(outcome: dict[str, Any]) -> str:
    model, strategy, left = outcome["model"], outcome["strategy"], outcome["requests_left"]
    if outcome["seconds"] is None:
        return f"{model} runs {strategy} already: {', '.join(outcome['first'])} first"
    more = f"; {left} requests still run on the old first stage" if left else ""
    return f"switched {model} to {strategy} in {outcome['seconds']:.1f} s{more}"


async def switch(
    workers: Workers, knows: WhyNot, to: str, timeout: float, say: client.Say, key: str
) -> dict[str, Any]:
    """Returns the outcome as JSON. Raises ConfigError before any worker is changed. After a later DisaggError, or the
    death of this process at any point, the deployment still serves, in the old order, the new one, or both; the same
    call completes the switch. `key`: the id of this command's.
    """
    fleet, began = Fleet(workers, FirstStages(knows), say), time.monotonic()
    there = await all_workers(workers)
    if not there:
        raise ConfigError("there is no worker: wait until one is ready, or give its --namespace")
    models = [each.description for each in there]
    strategies = {each.description.strategy for each in there} - {to}
    check_switch(to, min(strategies, default=to), models)
    require_key(there, key)
    wanted = Wanted(to, there[0].description.revision or "")
    outcome: dict[str, Any] = {"model": models[0].model, "strategy": to}

    def runs_it(wanted: Wanted, seen: Sequence[Seen]) -> bool:
        serving = [each for each in seen if each.phase is Phase.SERVING]
        return all(
            each.strategy == to and each.is_registered == each.takes_requests for each in serving
        ) and any(each.is_first for each in serving)

    def left(seen: Sequence[Seen]) -> int:
        return sum(each.requests for each in seen if not each.takes_requests)

    seen = await fleet.look(wanted)
    first = [each.name for each in seen if each.takes_requests]
    if runs_it(wanted, seen):
        return outcome | {"first": first, "seconds": None, "requests_left": 0}
    late = (
        "the order is not changed everywhere; give the command again to go on, or the opposite one to go back"
    )
    await fleet.reach(wanted, runs_it, timeout, late)
    deadline = time.monotonic() + timeout
    await fleet.reach(
        wanted, lambda _, seen: not left(seen) or time.monotonic() > deadline, timeout + 60.0, late
    )
    seen = await fleet.look(wanted)
    first = [each.name for each in seen if each.takes_requests]
    return outcome | {"first": first, "seconds": time.monotonic() - began, "requests_left": left(seen)}
