"""`switch`, `rollout` and `flip` of workers that no `up` has started: what is refused, the order of the steps, and half
a switch.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trtllm_disagg.admin.commands import Command, DescribedInstance, Flip, Leave, Switch
from trtllm_disagg.common.cli import run
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import (
    ConfigError,
    DisaggError,
    InvalidRequestError,
    PeerUnavailableError,
    StageTimeoutError,
)
from trtllm_disagg.strategies import spec_of, switchable
from trtllm_disagg.tools.admin import fleet
from trtllm_disagg.tools.admin.switch_command import shown
from trtllm_disagg.tools.up.commands import Rollout
from trtllm_disagg.tools.up.look import FirstStages

ROLES = {Role.PREFILL: (1, 2), Role.DECODE: (3, 4)}


class FakeDeployment:
    """Two workers of each role, and a frontend that learns of a change a few questions later. Every step is
    written down, and after each of them some worker can be sent requests.
    """

    def __init__(self, strategy: str = "decode_first", lag: int = 3) -> None:
        first = spec_of(strategy).entry_role
        self.said: dict[int, dict[str, Any]] = {
            i: {"role": role.value, "strategy": strategy, "model": "m", "registered": role.value == first}
            for role, ids in ROLES.items()
            for i in ids
        }
        self.steps: list[tuple[str, int]] = []
        #: What happens beside it, by the number of steps that were done.
        self.after_step: dict[int, Callable[[], object]] = {}
        self.fails_after: int | None = None
        self.lag = lag
        self.asked = defaultdict(int, dict.fromkeys(self.said, 0))

    async def workers(self) -> list[DescribedInstance]:
        for said in self.said.values():
            said["client_requests"] = max(0, said.get("client_requests", 0) - 1)
        return [DescribedInstance("dyn://n.c.e", i, dict(said)) for i, said in self.said.items()]

    async def send(self, endpoint_id: str, instance_id: int, command: Command) -> dict[str, Any]:
        if self.fails_after == len(self.steps) or instance_id not in self.said:
            raise PeerUnavailableError("it is gone")
        said = self.said[instance_id]
        if isinstance(command, Leave):
            self.steps.append(("left", instance_id))
            del self.said[instance_id]
            return {"requests_left": instance_id}
        assert isinstance(command, Switch)
        is_first = spec_of(command.to).entry_role == said["role"]
        said |= {"strategy": command.to, "registered": is_first}
        self.steps.append(("comes" if is_first else "leaves", instance_id))
        assert self.serves, "no worker can be sent requests"
        self.after_step.get(len(self.steps), lambda: None)()
        return said

    def why_not(self, model: str, instance_id: int) -> str:
        self.asked[instance_id] += instance_id in self.said and self.said[instance_id]["registered"]
        return "" if model == "m" and self.asked[instance_id] > self.lag else "not yet"

    @property
    def serves(self) -> bool:
        """Some worker is registered, and known to the frontend unless it was so from the start."""
        return any(said["registered"] for said in self.said.values())

    @property
    def strategies(self) -> set[str]:
        return {said["strategy"] for said in self.said.values()}


class OfFake(FirstStages):
    def __init__(self, fake: FakeDeployment) -> None:
        super().__init__()
        self.fake = fake

    async def why_not(self, model: str, instance: int, is_new: bool, waited: float) -> str:
        return self.fake.why_not(model, instance)


async def run_switch(fake: FakeDeployment, to: str, timeout: float = 5.0) -> tuple[str, list[str]]:
    lines: list[str] = []
    outcome = await fleet.change(fake, Switch(to), timeout, "key", OfFake(fake), report=lines.append)
    return shown(outcome), lines


async def test_a_new_first_stage_is_known_before_the_old_one_leaves() -> None:
    fake = FakeDeployment("decode_first")
    fake.said[3]["client_requests"] = 4
    line, lines = await run_switch(fake, "prefill_first")
    assert sorted(fake.steps[:2]) == [("comes", 1), ("comes", 2)]
    assert sorted(fake.steps[2:]) == [("leaves", 3), ("leaves", 4)]
    assert all(fake.asked[i] > fake.lag for i in ROLES[Role.PREFILL])
    assert fake.said[3]["client_requests"] == 0
    assert line.startswith("switched m to prefill_first in ")
    assert "still run" not in line
    assert lines[-1] in (
        "decode 3 is a second stage under prefill_first",
        "decode 4 is a second stage under prefill_first",
    )


async def test_repeated_switches_end_in_the_asked_strategy_and_the_last_changes_nothing() -> None:
    fake = FakeDeployment("decode_first")
    for to in ("prefill_first", "decode_first", "auto"):
        await run_switch(fake, to)
        assert fake.strategies == {to}
    fake.steps.clear()
    line, _ = await run_switch(fake, "auto")
    assert (line, fake.steps) == ("m already runs auto: decode 3, decode 4 first", [])


@pytest.mark.parametrize("steps_done", range(4))
@pytest.mark.parametrize("then", ["prefill_first", "decode_first"])
async def test_switch_that_failed_midway_serves_and_the_next_one_completes_or_undoes_it(
    steps_done: int, then: str
) -> None:
    fake = FakeDeployment("decode_first")
    fake.fails_after = steps_done
    with pytest.raises(StageTimeoutError):
        await run_switch(fake, "prefill_first", 0.3)
    assert fake.serves
    fake.fails_after = None
    await run_switch(fake, then)
    assert fake.strategies == {then}
    first = Role(spec_of(then).entry_role or "agg")
    assert {i for i, said in fake.said.items() if said["registered"]} == set(ROLES[first])


async def test_switch_times_out_and_keeps_the_old_first_stage_while_the_frontend_lacks_the_new() -> None:
    fake = FakeDeployment("decode_first", lag=10**9)
    with pytest.raises(StageTimeoutError, match="repeat the command, or switch back"):
        await run_switch(fake, "prefill_first", timeout=0.2)
    assert all(fake.said[i]["registered"] for i in ROLES[Role.DECODE])


@pytest.mark.parametrize(
    ("to", "change", "named"),
    [
        ("sideways", {}, f"one of {', '.join(switchable())}"),
        ("router", {}, f"one of {', '.join(switchable())}"),
        ("agg", {}, f"one of {', '.join(switchable())}"),
        ("prefill_first", {1: None, 2: None}, "no prefill worker .*2 decode.* its own by --endpoint"),
        ("decode_first", {1: None, 2: None}, "there are: 2 decode"),
        ("prefill_first", dict.fromkeys(range(1, 5)), "no workers found"),
        ("prefill_first", {i: {"strategy": "router"} for i in range(1, 5)}, "under router"),
        ("prefill_first", {4: {"role": "agg"}}, "1 agg"),
        ("prefill_first", {4: {"model": "other"}}, "m, other"),
        (
            "prefill_first",
            {2: {"fixed_by": ["--endpoint dyn://n.mine.generate"]}},
            "prefill was started with --endpoint dyn://n.mine.generate",
        ),
        ("prefill_first", {4: {"key": "another"}}, r"--key-file: 'key' is not allowed; .* decode 4 .another"),
        (
            "prefill_first",
            {4: {"process": "decode-1"}},
            "decode 4 is decode-1 of an `up`; give the --run-dir",
        ),
        ("prefill_first", {4: {"role": "cook"}}, "instance 4 at dyn://n.c.e is not a trtllm-disagg worker"),
    ],
)
async def test_switch_that_is_not_possible_is_refused_before_any_worker_changes(
    to: str, change: dict[int, Any], named: str
) -> None:
    fake = FakeDeployment("decode_first")
    for instance_id, keys in change.items():
        if keys is None:
            del fake.said[instance_id]
        else:
            fake.said[instance_id] |= keys
    with pytest.raises(ConfigError, match=named):
        await run_switch(fake, to)
    assert fake.steps == []


async def test_a_worker_that_returns_under_another_id_is_switched_there_and_one_that_dies_is_left_out() -> (
    None
):
    fake = FakeDeployment("decode_first")
    back = {"strategy": "decode_first", "registered": False}
    fake.after_step = {2: lambda: fake.said.update({5: fake.said.pop(1) | back}), 3: lambda: fake.said.pop(4)}
    await run_switch(fake, "prefill_first")
    assert fake.strategies == {"prefill_first"}
    assert {i for i, said in fake.said.items() if said["registered"]} == {2, 5}


async def test_a_role_that_dies_during_the_switch_is_no_wrong_setting() -> None:
    """Exit code 2 would say that nothing has begun."""
    fake = FakeDeployment("decode_first")
    fake.after_step[2] = lambda: [fake.said.pop(prefill) for prefill in ROLES[Role.PREFILL]]
    with pytest.raises(StageTimeoutError):
        await run_switch(fake, "prefill_first", 0.3)
    assert {i for i, said in fake.said.items() if said["registered"]} == set(ROLES[Role.DECODE])


async def test_switch_outcome_names_requests_that_still_run() -> None:
    fake = FakeDeployment("decode_first", lag=0)
    fake.said[3]["client_requests"] = 10**9
    line, _ = await run_switch(fake, "prefill_first", timeout=0.2)
    assert "requests still run on the old first stage" in line


class _Answers(http.server.BaseHTTPRequestHandler):
    """A frontend that knows instance 7, and serves chat only."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        pin = self.headers["x-dynamo-worker-instance-id"]
        known = self.path == "/v1/chat/completions" and pin == "7" and body["model"] == "m"
        is_silent = body["model"] == "silent"  # DYN_DISABLE_FRONTEND_NVEXT=1
        answer: dict[str, Any] = {"choices": [1]} if known or is_silent else {"message": "no"}
        if known:
            answer["nvext"] = {"worker_id": {"decode_worker_id": 7}}
        self.send_response(200 if known or is_silent else 400)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def frontend_url() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("is_new", [False, True])
async def test_frontend_knows_a_worker_only_if_it_accepts_a_pin_to_it(
    frontend_url: str, is_new: bool
) -> None:
    first_stages = FirstStages(frontend_url, 60.0)
    assert not await first_stages.why_not("m", 7, is_new, 0.0)
    assert await first_stages.why_not("m", 8, is_new, 0.0)
    assert await first_stages.why_not("n", 7, is_new, 0.0)
    assert await FirstStages("http://127.0.0.1:1", 60.0).why_not("m", 7, is_new, 0.0)


async def test_an_unknown_or_silent_frontend_is_trusted_after_settle_seconds(frontend_url: str) -> None:
    for url in ("", frontend_url):
        assert not await FirstStages(url, 1.0).why_not("silent", 7, False, 2.0)
        assert await FirstStages(url, 1.0).why_not("silent", 7, False, 0.5)


class Flipping:
    """A worker, 1 as prefill, that takes a flip and is there again, as instance 2 with `then` in its description; and
    another one, 9.
    """

    def __init__(self, answer: dict[str, Any] | DisaggError, **then: Any) -> None:
        self._answer = answer
        self._then = {"role": "decode", "strategy": "router", "model": "m", "flipped_from": "1"} | then
        self._now, self._looks = {"role": "prefill", "strategy": "router", "model": "m"}, 0
        self._other = DescribedInstance("dyn://n.c.e", 9, self._now)

    async def workers(self) -> list[DescribedInstance]:
        if self._looks == 0:
            return [DescribedInstance("dyn://n.c.e", 1, self._now), self._other]
        self._looks += 1
        # It is listed before it has entered its role.
        return [DescribedInstance("dyn://n.c.e", 2, self._then | {"ready": self._looks > 3}), self._other]

    async def send(self, endpoint_id: str, instance_id: int, command: Command) -> dict[str, Any]:
        self._looks = 1
        if isinstance(self._answer, DisaggError):
            raise self._answer
        return self._answer


async def flip(flipping: Flipping, instance: str, seconds: float = 5.0) -> dict[str, Any]:
    command = Flip("decode", process=instance)
    outcome: dict[str, Any] = await fleet.change(flipping, command, seconds, "key", FirstStages())
    return outcome


async def test_a_flip_is_done_when_the_worker_is_ready_in_its_new_role() -> None:
    flipping = Flipping({"warnings": ["it is small"]})
    outcome = await flip(flipping, "1")
    del outcome["seconds"]
    assert outcome == {
        "was": "prefill 1",
        "role": "decode",
        "instance": "2",
        "process": "",
        "warnings": ["it is small"],
    }


async def test_a_flip_whose_answer_was_lost_is_done_all_the_same_and_said_again_changes_nothing() -> None:
    flipping = Flipping(PeerUnavailableError("it has left"))
    assert (await flip(flipping, "1"))["instance"] == "2"
    again = await flip(flipping, "2")
    assert (again["was"], again["instance"]) == ("decode 2", "2")


@pytest.mark.parametrize(
    ("flipping", "error", "named"),
    [
        (
            Flipping({}, role="prefill"),
            DisaggError,
            "prefill 1 could not become decode, and is prefill again",
        ),
        (Flipping({}, flipped_from="7"), StageTimeoutError, "after 0.5 s prefill 1 is not decode"),
        (Flipping(InvalidRequestError("not here")), InvalidRequestError, "not here"),
    ],
)
async def test_a_flip_that_did_not_happen_says_so(
    flipping: Flipping, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        await flip(flipping, "1", 0.5)


async def test_an_instance_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="'c' is not allowed; expected one of prefill 1"):
        await flip(Flipping({}), "c")


# -- rollout


def two_revisions(strategy: str) -> FakeDeployment:
    """Workers 1 and 3 are the old ones."""
    fake = FakeDeployment(strategy)
    for i, said in fake.said.items():
        is_first = strategy == "router" or said["registered"]
        said |= {"revision": "old" if i % 2 else "new", "registered": is_first}
    return fake


async def run_rollout(fake: FakeDeployment, timeout: float = 5.0) -> dict[str, Any]:
    rollout = Rollout("new", drain_seconds=7.0)
    outcome: dict[str, Any] = await fleet.change(fake, rollout, timeout, "key", OfFake(fake), "old")
    return outcome


@pytest.mark.parametrize(
    ("strategy", "first", "left"),
    [("prefill_first", 2, [1, 3]), ("decode_first", 4, [3, 1]), ("router", 4, [1, 3])],
)
async def test_old_workers_leave_in_order_when_the_frontend_knows_the_new_first_stage(
    strategy: str, first: int, left: list[int]
) -> None:
    fake = two_revisions(strategy)
    outcome = await run_rollout(fake)
    assert fake.steps == [("left", i) for i in left]
    assert fake.asked[first] > fake.lag
    assert outcome["serving"] == ["prefill 2", "decode 4"]
    assert (sorted(outcome["left"]), outcome["requests_given_up"]) == (["decode 3", "prefill 1"], 4)


async def test_no_worker_leaves_before_the_new_revision_has_a_worker_of_each_role() -> None:
    fake = two_revisions("decode_first")
    del fake.said[2]
    with pytest.raises(
        StageTimeoutError, match=r"after 0 s revision new does not answer .* a worker of each role"
    ):
        await run_rollout(fake, 0.0)
    assert fake.steps == []


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--to a/b", "--to: 'a/b' is not allowed; expected letters"),
        ("--to v2 --model m", "--model needs --run-dir"),
        ("--to v2 --run-dir /no --from v1 --namespace n", "give no --namespace and no --from"),
    ],
)
def test_an_invalid_rollout_is_refused_before_any_worker_is_asked(line: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run(["rollout", *line.split()])
