"""`trtllm-disagg set`: which workers are told, what is refused by name, and what is printed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from trtllm_disagg.admin.commands import Command, DescribedInstance, Set, Switch
from trtllm_disagg.common.cli import run
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.config.thresholds import NAMES
from trtllm_disagg.errors import ConfigError, PeerUnavailableError, StageTimeoutError
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.admin import fleet
from trtllm_disagg.tools.up.look import FirstStages

VALUES: dict[str, int | float | str | bool] = {"max_local_prefill_length": 500}


class FakeDeployment:
    """Workers of both roles that take whatever they are told; those in `gone` do not answer. Each is ready at its third
    look.
    """

    def __init__(
        self, strategy: str = "decode_first", roles: tuple[str, ...] = ("prefill", "decode")
    ) -> None:
        self.said: dict[int, dict[str, Any]] = {
            10 + i: {"role": role, "strategy": strategy, "model": "m"} for i, role in enumerate(roles)
        }
        self.told: dict[int, Command] = {}
        self.gone: set[int] = set()
        self.looks = 0

    async def workers(self) -> list[DescribedInstance]:
        self.looks += 1
        return [
            DescribedInstance("dyn://n.c.e", i, {"ready": self.looks > 2} | said)
            for i, said in self.said.items()
        ]

    async def send(self, endpoint_id: str, instance_id: int, command: Command) -> dict[str, Any]:
        assert self.looks > 2
        if instance_id in self.gone:
            raise PeerUnavailableError("it is gone")
        if isinstance(command, Switch):
            said = self.said[instance_id]
            said |= {"strategy": command.to, "registered": said["role"] == spec_of(command.to).entry_role}
        same = self.told.get(instance_id) == command
        self.told[instance_id] = command
        return {"changed": [] if same else ["max_local_prefill_length: 1000 -> 500"]}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDeployment:
    """What the commands reach."""
    deployment = FakeDeployment()

    def connected(args: object, work: Callable[..., Any], *_: object) -> Any:
        return asyncio.run(work(deployment, "key"))

    monkeypatch.setattr(fleet, "connected", connected)
    return deployment


async def run_set(fake: FakeDeployment, instance: str = "", **values: int) -> list[dict[str, Any]]:
    command = Set({**(values or VALUES)}, instance)
    outcome: list[dict[str, Any]] = await fleet.change(fake, command, 5.0, "key", FirstStages())
    return outcome


LINE = ["set", "--max-local-prefill-length", "500"]


def test_set_changes_all_workers_when_they_are_ready_and_prints_old_and_new_values(
    fake: FakeDeployment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(LINE) is ExitCode.DONE
    assert fake.told == {10: Set(VALUES), 11: Set(VALUES)}
    assert capsys.readouterr().out.splitlines() == [
        "prefill a: max_local_prefill_length: 1000 -> 500",
        "decode b: max_local_prefill_length: 1000 -> 500",
    ]
    assert run(LINE) is ExitCode.DONE
    assert capsys.readouterr().out == "prefill a: unchanged\ndecode b: unchanged\n"


async def test_bounds_of_the_queue_are_for_every_worker() -> None:
    fake = FakeDeployment("router", ("agg", "prefill"))
    await run_set(fake, max_queued_requests=3, max_queued_tokens=0)
    assert fake.told == dict.fromkeys((10, 11), Set({"max_queued_requests": 3, "max_queued_tokens": 0}))


async def test_set_with_instance_changes_only_that_worker() -> None:
    fake = FakeDeployment()
    await run_set(fake, "B")
    assert list(fake.told) == [11]
    with pytest.raises(
        ConfigError, match="--instance: 'ff' is not allowed; expected one of prefill a, decode b"
    ):
        await run_set(fake, "ff")


def test_a_worker_that_starts_for_longer_is_no_success(fake: FakeDeployment) -> None:
    fake.said[12] = {"role": "decode", "strategy": "decode_first", "model": "m", "ready": False}
    with pytest.raises(StageTimeoutError, match=r"after 0\.5 s a worker is still starting"):
        run([*LINE, "--timeout", "0.5"])
    assert fake.told == dict.fromkeys((10, 11), Set(VALUES))


@pytest.mark.parametrize(
    ("strategy", "roles", "there"),
    [
        ("decode_first", (), "^no workers found; wait until"),
        ("decode_first", ("agg",), "there is: agg a under decode_first"),
        ("router", ("prefill", "decode"), "prefill a under router, decode b under router"),
    ],
)
async def test_without_a_deciding_worker_it_is_refused(
    strategy: str, roles: tuple[str, ...], there: str
) -> None:
    fake = FakeDeployment(strategy, roles)
    with pytest.raises(ConfigError, match=there):
        await run_set(fake)
    assert fake.told == {}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", ", ".join("--" + name.replace("_", "-") for name in NAMES)),
        ("--max-local-prefill-length -1", "--max-local-prefill-length: -1 .* an integer from 0"),
        ("--max-prefill-queue-size many", "--max-prefill-queue-size: 'many' .* an integer"),
        ("--eff-isl-ratio-threshold 1.5", "--eff-isl-ratio-threshold: 1.5 .* a number from 0 to 1"),
        ("--max-local-prefil-length 5", "unknown flag .*did you mean --max-local-prefill-length"),
        ("--eff-isl-threshold 5 --run-dir /no --namespace n", "give no --namespace"),
        ("--eff-isl-threshold 5 --namespace a/b", "^--namespace: 'a/b' is not allowed; expected letters"),
        ("--eff-isl-threshold 5 --run-dir /no/such", "--run-dir: '/no/such'"),
    ],
)
def test_invalid_set_command_is_refused_before_any_worker_is_asked(line: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run(["set", *line.split()])


@pytest.mark.parametrize("variable", ["DYN_NAMESPACE", "TRTLLM_DISAGG_NAMESPACE"])
def test_a_wrong_namespace_variable_is_refused_by_its_name(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "a.b")
    with pytest.raises(ConfigError, match=rf"^{variable}: 'a\.b' is not allowed; expected letters, digits"):
        run(["set", "--eff-isl-threshold", "5"])


# -- --json: one JSON value on stdout, whatever else is said goes to stderr


def test_set_lists_each_worker_with_what_changed_or_why_not(
    fake: FakeDeployment, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.gone = {10}
    assert run([*LINE, "--json"]) is ExitCode.FAILED
    said = capsys.readouterr()
    assert json.loads(said.out) == [
        {"worker": "prefill a", "changed": [], "error": "it is gone"},
        {"worker": "decode b", "changed": ["max_local_prefill_length: 1000 -> 500"], "error": None},
    ]
    assert said.err == "error: prefill a: it is gone\n"


def test_switch_json_has_model_strategy_and_first_stage(
    fake: FakeDeployment, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.said[11] |= {"registered": True}
    words = ["switch", "--to", "prefill_first", "--settle", "0", "--json"]
    assert run(words) is ExitCode.DONE
    told = json.loads(capsys.readouterr().out)
    assert told.pop("seconds") >= 0
    assert told == {"model": "m", "strategy": "prefill_first", "first": ["prefill a"], "requests_left": 0}
    assert run(words) is ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["seconds"] is None
