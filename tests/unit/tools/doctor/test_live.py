"""What is collected of a deployment, with a frontend, a machine and a discovery that are made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from trtllm_disagg.config.settings import COMPONENTS, SHARED_COMPONENT
from trtllm_disagg.errors import ConfigError, PeerUnavailableError
from trtllm_disagg.processes.limits import MachineLimits, Needs
from trtllm_disagg.tools.doctor.frontend import (
    Answer,
    AnswerTrace,
    FrontendClient,
    Instance,
    ProbeFailedError,
    Sizes,
)
from trtllm_disagg.tools.doctor.live import Observed, Sources, is_readable, look
from trtllm_disagg.tools.doctor.this_machine import LocalProcess

FILES = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": "/run/discovery", "HOME": "/root"}
STAYED = Answer(165, 0, 0.0, 2, 2, AnswerTrace("local", "short"))
CROSSED = replace(STAYED, trace=AnswerTrace("decode_first", "always", prefill_instance="1"))


def instance(number: int, component: str, endpoint: str = "generate", namespace: str = "mine") -> Instance:
    return Instance(namespace, component, endpoint, number, {"tcp": f"127.0.0.1:{5000 + number}/x/y"})


PAIR = [
    instance(1, COMPONENTS["prefill"]),
    instance(2, COMPONENTS["decode"]),
    instance(2, SHARED_COMPONENT),
    instance(2, SHARED_COMPONENT, "worker_kv_query_source_2"),
    instance(3, COMPONENTS["decode"], namespace="another"),
]


@dataclass
class FakeFrontend(FrontendClient):
    served: list[str] = field(default_factory=lambda: ["demo"])
    listed: list[Instance] | None = field(default_factory=lambda: PAIR)
    answers: list[Answer | ProbeFailedError] = field(default_factory=lambda: [CROSSED])
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    url: str = "http://f:8000"

    def models(self) -> list[str]:
        return self.served

    def instances(self) -> list[Instance] | None:
        return self.listed

    def sizes(self, model: str) -> Sizes:
        return Sizes(32, 4096)

    def ask(self, model: str, prompt: str, annotations: tuple[str, ...] = ()) -> Answer:
        self.asked.append((prompt, annotations))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ProbeFailedError):
            raise answer
        return answer


@dataclass
class FakeMachine:
    """`listeners` by port."""

    listeners: Mapping[int, LocalProcess] = field(default_factory=dict)
    needed: list[Needs] = field(default_factory=list)

    def listener(self, host: str, port: int) -> LocalProcess | None:
        return self.listeners.get(port)

    def limits(self, needs: Needs) -> MachineLimits:
        self.needed.append(needs)
        return MachineLimits()


@dataclass
class FakeDirectory:
    descriptions: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    asked: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    def describe(self, namespace: str, variables: Mapping[str, str]) -> Mapping[int, Mapping[str, Any]]:
        self.asked.append((namespace, variables))
        if not self.descriptions:
            raise PeerUnavailableError("discovery does not answer")
        return self.descriptions


def seen(
    frontend: FakeFrontend,
    machine: FakeMachine | None = None,
    directory: FakeDirectory | None = None,
    model: str | None = None,
) -> Observed:
    machine, directory = machine or FakeMachine(), directory or FakeDirectory()
    sources = Sources(
        frontend,
        FILES,
        listener=machine.listener,
        limits=machine.limits,
        describe=directory.describe,
    )
    return look(sources, model, 0.0, lambda text: None)


def test_workers_of_the_namespace_that_answered_are_seen_with_their_roles() -> None:
    observed = seen(FakeFrontend())
    assert [str(worker) for worker in observed.workers or ()] == ["prefill 1", "decode 2"]
    assert observed.undescribed == "discovery does not answer"
    assert (observed.frontend, observed.limits) == (None, None)


def test_role_of_a_worker_at_the_shared_component_is_its_description_or_unknown() -> None:
    front = [instance(2, SHARED_COMPONENT)]
    assert [str(w) for w in seen(FakeFrontend(listed=front)).workers or ()] == ["worker 2"]
    told = FakeDirectory({2: {"role": "agg"}})
    assert [str(w) for w in seen(FakeFrontend(listed=front), directory=told).workers or ()] == ["agg 2"]


def test_discovery_is_where_the_frontend_on_this_machine_has_it() -> None:
    process = LocalProcess(
        7, {"DYN_FILE_KV": "/its", "DYN_DISCOVERY_BACKEND": "file", "X": "1"}, ("dynamo.frontend",)
    )
    worker = LocalProcess(8)
    machine, directory = FakeMachine({8000: process, 5001: worker}), FakeDirectory({1: {"role": "prefill"}})
    observed = seen(FakeFrontend(), machine, directory)
    assert directory.asked == [("mine", {"DYN_FILE_KV": "/its", "DYN_DISCOVERY_BACKEND": "file"})]
    assert observed.frontend is process
    assert [each.process for each in observed.workers or ()] == [worker, None]
    assert machine.needed == [Needs(inotify_instances=9, peers=2)]


def test_port_forwarding_process_is_not_taken_for_the_frontend() -> None:
    machine, directory = (
        FakeMachine({8000: LocalProcess(7, {}, ("ssh", "-L", "8000:f:8000"))}),
        FakeDirectory(),
    )
    assert seen(FakeFrontend(), machine, directory).limits is None
    assert directory.asked == [("mine", {k: v for k, v in FILES.items() if k != "HOME"})]


def test_local_answer_is_followed_by_a_prompt_with_the_order_annotation() -> None:
    frontend = FakeFrontend(answers=[STAYED, CROSSED])
    observed = seen(frontend)
    assert (observed.plain, observed.crossing) == (STAYED, CROSSED)
    assert [annotations for _, annotations in frontend.asked] == [(), ("disagg:decode_first",), ()]
    first, ordered, again = (prompt for prompt, _ in frontend.asked)
    assert first == again != ordered


def test_a_prompt_is_asked_again_until_the_router_knows_it() -> None:
    known = replace(CROSSED, hit_rate=0.5)
    observed = seen(FakeFrontend(answers=[CROSSED, known]))
    assert observed.repeats is not None
    assert observed.repeats.last is known


def test_a_request_that_fails_is_kept_with_what_can_still_be_seen() -> None:
    failed = ProbeFailedError("503: no instance")
    observed = seen(FakeFrontend(answers=[failed]))
    assert (observed.plain, observed.ordered, observed.repeats) == (failed, None, None)
    assert [worker.instance_id for worker in observed.workers or ()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("served", "model", "told"),
    [
        ([], None, "no worker is registered"),
        (["a", "b"], None, "--model is missing: http://f:8000 serves a, b"),
        (["a", "b"], "c", "--model: 'c' is not allowed; expected one of a, b"),
    ],
)
def test_a_model_that_cannot_be_asked_is_refused_by_name(
    served: list[str], model: str | None, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        seen(FakeFrontend(served), model=model)


def test_one_of_several_models_is_asked() -> None:
    assert seen(FakeFrontend(["a", "b"]), model="b").model == "b"


@pytest.mark.parametrize(
    "answer", [{"role": ["prefill"]}, {"versions": ["0.1.0"]}, {"strategy": {}}, {"engine": 5}]
)
def test_answer_of_another_program_is_no_description(answer: dict[str, Any]) -> None:
    assert is_readable({"role": "prefill", "versions": {"trtllm_disagg": "0.1.0", "ai_dynamo": None}})
    assert is_readable({})
    assert not is_readable(answer)
