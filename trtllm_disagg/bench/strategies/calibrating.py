"""What our own software adds to a request on this machine: by a few single requests, before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from urllib.parse import urlsplit

from trtllm_disagg.bench.http_client import Connection, completion_request
from trtllm_disagg.bench.strategies.estimate import Worker
from trtllm_disagg.bench.strategies.measuring import Target
from trtllm_disagg.bench.strategies.records import Arm, Plan, Software
from trtllm_disagg.bench.strategies.workloads import Ask, Shape, Traffic
from trtllm_disagg.strategies import spec_of

#: Of each workload; the first ones only warm up.
WARM_UP, REQUESTS = 2, 6
#: Of an answer: a handoff is in it, and steps end when they would, however late the one before was.
TOKENS = 24


def arm_to_ask(plan: Plan) -> Arm:
    """One with two workers in a row, if there is one: more software than agg."""
    orders = (arm for arm in plan.arms if spec_of(arm.strategy).is_worker_side)
    return next(orders, plan.arms[0])


async def calibrate(
    target: Target, arm: Arm, workers: Mapping[str, Worker], traffics: Mapping[str, Traffic], vocabulary: int
) -> dict[str, Software]:
    """By workload, on a deployment with the wall's clock."""
    prefill = workers["agg" if arm.agg_workers else "prefill"]
    decode = workers["agg" if arm.agg_workers else "decode"]
    found = {}
    for name, traffic in traffics.items():
        asks = traffic.asks(1.0, WARM_UP + REQUESTS, "calibration", vocabulary)
        beyond = [await _beyond(target, ask, prefill, decode, arm) for ask in asks]
        firsts, rests = zip(*beyond[WARM_UP:], strict=True)
        found[name] = Software(max(0.0, mean(firsts)) * 1000, max(0.0, mean(rests)) * 1000)
    return found


async def _beyond(target: Target, ask: Ask, prefill: Worker, decode: Worker, arm: Arm) -> tuple[float, float]:
    """Seconds of a first token, and of all after it, that no GPU and no link took."""
    place = urlsplit(target.url)
    connection = await Connection.open(place.hostname or "127.0.0.1", place.port or 80)
    try:
        answer = await connection.ask(completion_request(target.model, ask.prompt, TOKENS))
    finally:
        connection.close()
    answer.events()
    whole, alone = Shape(len(ask.prompt), TOKENS), Shape(len(ask.prompt), 1)
    first = prefill.prefill_seconds(whole)
    rest = decode.isolated_seconds(whole) - decode.isolated_seconds(alone)
    moving = 0.0 if arm.agg_workers else prefill.sending_seconds(whole)
    first_seen, rest_seen = answer.first - answer.asked, answer.ended - answer.first
    if spec_of(arm.strategy).entry_role is None and not arm.agg_workers:
        first, moving = first + moving, 0.0
    return first_seen - first, rest_seen - rest - moving
