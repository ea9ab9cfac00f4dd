"""`trtllm-disagg set`: which workers are told, what is refused by name, and what is printed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from trtllm_disagg.admin.commands import Command, DescribedInstance, Set, Signer, Switch, UpCommand
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.cli import run
from trtllm_disagg.config.thresholds import NAMES
from trtllm_disagg.errors import ConfigError, PeerUnavailableError
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.admin import client
from trtllm_disagg.tools.admin.set_command import Change, set_thresholds

VALUES: dict[str, int | float | str | bool] = {"max_local_prefill_length": 500}


class FakeUp(client.Up):
    """Its workers that are starting are ready when they have been asked for twice."""

    def __init__(self, deployment: FakeDeployment) -> None:
        super().__init__()
        self._deployment = deployment
        self._looks = 0
        self.heard: list[UpCommand] = []
        self.to_come: dict[int, dict[str, Any]] = {}

    def change_new_workers(self, command: UpCommand) -> None:
        self.heard.append(command)

    def starting(self) -> set[str]:
        self._looks += 1
        if self._looks > 2:
            self._deployment.said |= self.to_come
            self.to_come = {}
        return {f"decode-{each}" for each in self.to_come}


class FakeDeployment:
    """Workers of both roles that take whatever they are told; those in `gone` do not answer."""

    def __init__(
        self, strategy: str = "decode_first", roles: tuple[str, ...] = ("prefill", "decode")
    ) -> None:
        self.said: dict[int, dict[str, Any]] = {
            10 + i: {"role": role, "strategy": strategy, "model": "m"} for i, role in enumerate(roles)
        }
        self.told: dict[int, Command] = {}
        self.gone: set[int] = set()
        self.up = FakeUp(self)

    async def workers(self) -> list[DescribedInstance]:
        return [DescribedInstance("dyn://n.c.e", i, said) for i, said in self.said.items()]

    async def send(self, endpoint_id: str, instance_id: int, command: Command) -> dict[str, Any]:
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

    async def carry_out(change: client.Change[ExitCode]) -> ExitCode:
        return await change(deployment, deployment.up)

    monkeypatch.setattr(client, "set_all", lambda args, change: asyncio.run(carry_out(change)))
    monkeypatch.setattr(client, "change_fleet", lambda args, change: asyncio.run(change(deployment)))
    monkeypatch.setattr(client, "signer", lambda args: Signer(AdminKey(b"secret")))
    return deployment


async def run_set(
    fake: FakeDeployment, instance: int | None = None
) -> tuple[list[Change], list[str], list[str]]:
    said: list[str] = []
    errors: list[str] = []
    return await set_thresholds(fake, VALUES, instance, said.append, errors.append), said, errors


async def test_set_changes_all_workers_and_prints_old_and_new_values() -> None:
    fake = FakeDeployment()
    told, said, _ = await run_set(fake)
    assert fake.told == {10: Set(VALUES), 11: Set(VALUES)}
    changed = ("max_local_prefill_length: 1000 -> 500",)
    assert (told, said) == (
        [Change("prefill a", changed), Change("decode b", changed)],
        [
            "prefill a: max_local_prefill_length: 1000 -> 500",
            "decode b: max_local_prefill_length: 1000 -> 500",
        ],
    )
    assert (await run_set(fake))[1] == ["prefill a: has these already", "decode b: has these already"]


async def test_bounds_of_the_queue_are_for_every_worker() -> None:
    fake = FakeDeployment("router", ("agg", "prefill"))
    values: dict[str, int | float | str | bool] = {"max_queued_requests": 3, "max_queued_tokens": 0}
    await set_thresholds(fake, values, None, lambda _: None, lambda _: None)
    assert fake.told == {10: Set(values), 11: Set(values)}


async def test_set_with_instance_changes_only_that_worker() -> None:
    fake = FakeDeployment()
    await run_set(fake, 11)
    assert list(fake.told) == [11]
    with pytest.raises(
        ConfigError, match="--instance: 'ff' is not allowed; expected one of prefill a, decode b"
    ):
        await run_set(fake, 255)


def test_set_changes_a_starting_worker_when_it_is_ready(
    fake: FakeDeployment, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.up.to_come = {12: {"role": "decode", "strategy": "decode_first", "model": "m"}}

    assert run(["set", "--max-local-prefill-length", "500"]) is ExitCode.DONE
    assert fake.told == dict.fromkeys((10, 11, 12), Set(VALUES))
    assert fake.up.heard == [Set(VALUES)], "workers to come need no second telling"
    said = capsys.readouterr()
    assert [line.split(":")[0] for line in said.out.splitlines()] == ["prefill a", "decode b", "decode c"]
    assert said.err == "waiting for decode-12: started with the old thresholds, and not ready yet\n"


def test_a_worker_that_starts_for_longer_is_named_and_holds_up_no_other_command(
    fake: FakeDeployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.up.to_come = {12: {}}
    monkeypatch.setattr(fake.up, "starting", lambda: {"decode-12"})

    line = ["set", "--max-local-prefill-length", "500", "--timeout", "0"]
    assert run(line) is ExitCode.FAILED
    assert fake.told == dict.fromkeys((10, 11), Set(VALUES))
    assert "error: decode-12: still starting after 0 s" in capsys.readouterr().err


def test_a_value_that_every_worker_refuses_is_not_given_to_workers_to_come(
    fake: FakeDeployment, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.gone = {10, 11}

    assert run(["set", "--max-local-prefill-length", "500"]) is ExitCode.FAILED
    assert fake.up.heard == []
    assert capsys.readouterr().err.count("error: ") == 2


async def test_set_names_a_worker_without_an_answer_and_changes_the_others() -> None:
    fake = FakeDeployment()
    fake.gone = {10}
    told, said, errors = await run_set(fake)
    assert (told[0].error, told[1].error) == ("it is gone", None)
    assert (len(said), errors) == (1, ["error: prefill a: it is gone"])
    assert list(fake.told) == [11]


@pytest.mark.parametrize(
    ("strategy", "roles", "there"),
    [
        ("decode_first", (), "^no worker of any role is there to be set: wait until"),
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
        ("--max-local-prefill-length -1", "--max-local-prefill-length: -1 .* a whole number, 0 or more"),
        ("--max-prefill-queue-size many", "--max-prefill-queue-size: 'many' .* a whole number"),
        ("--eff-isl-ratio-threshold 1.5", "--eff-isl-ratio-threshold: 1.5 .* a number from 0 to 1"),
        ("--max-local-prefil-length 5", "unknown flag .*did you mean --max-local-prefill-length"),
        ("--eff-isl-threshold 5 --run-dir /no --namespace n", "give no --namespace"),
        ("--eff-isl-threshold 5 --namespace a/b", "^--namespace: 'a/b' is not allowed; expected letters"),
        ("--eff-isl-threshold 5 --run-dir /no/such", "--run-dir: '/no/such'"),
        ("--eff-isl-threshold 5 --instance here", "--instance: 'here' .* hexadecimal"),
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
    assert run(["set", "--max-local-prefill-length", "500", "--json"]) is ExitCode.FAILED
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
