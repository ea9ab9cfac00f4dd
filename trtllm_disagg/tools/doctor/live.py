"""What can be seen of a deployment that serves, from its frontend's URL. `look` collects it, `live_rules` judges it.

Three sources, each of which may be missing: the frontend's pages; the answers to requests, which say what the workers
did; and, where discovery can be reached, the workers' descriptions of themselves. Of a deployment on this machine the
processes tell where its discovery is, and what limits they run under.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trtllm_disagg.admin.commands import NoKeySigner
from trtllm_disagg.config.settings import COMPONENTS, SHARED_COMPONENT
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError, DisaggError, PeerUnavailableError, StageTimeoutError
from trtllm_disagg.processes.limits import INOTIFY_PER_FRONTEND, MachineLimits, Needs
from trtllm_disagg.strategies import orders
from trtllm_disagg.tools.admin.client import quiet_runtime
from trtllm_disagg.tools.doctor.frontend import (
    Answer,
    FrontendClient,
    Instance,
    ProbeFailedError,
    fresh_prompt,
)
from trtllm_disagg.tools.doctor.this_machine import LocalProcess, listener

_ANSWER_SECONDS = 5.0
_BACKEND, _ETCD = "DYN_DISCOVERY_BACKEND", "ETCD_ENDPOINTS"
#: The variables by which Dynamo's processes find each other.
_DISCOVERY = re.compile(r"DYN_(DISCOVERY_BACKEND|FILE_KV|REQUEST_PLANE|EVENT_PLANE)|(ETCD|NATS)_\w+")
_POLL_SECONDS = 0.2
LOCAL = "local"
Say = Callable[[str], None]
Description = Mapping[str, Any]


def describe(namespace: str, variables: Mapping[str, str]) -> dict[int, dict[str, Any]]:
    """The descriptions of the workers that answer, by instance, from Dynamo's discovery; `variables` say where it is.
    Raises a DisaggError when it cannot be asked.
    """
    if not variables.get(_BACKEND) and not variables.get(_ETCD):
        raise PeerUnavailableError("the deployment's discovery is not known here")
    os.environ.update(variables)
    with quiet_runtime(os.environ):
        try:
            return asyncio.run(_described(namespace, variables))
        except DisaggError:
            raise
        except Exception as error:
            raise PeerUnavailableError(f"discovery does not answer: {error}") from error


async def _described(namespace: str, variables: Mapping[str, str]) -> dict[int, dict[str, Any]]:
    from trtllm_disagg.dynamo_runtime.controller import controller

    async with controller(
        backend=variables.get(_BACKEND) or "etcd",
        request_plane=variables.get("DYN_REQUEST_PLANE") or "tcp",
        event_plane=variables.get("DYN_EVENT_PLANE") or "zmq",
        namespace=namespace,
        signer=NoKeySigner(),
        timeout=_ANSWER_SECONDS,
    ) as workers:
        answered = await workers.workers(without=(PeerUnavailableError, StageTimeoutError))
        return {each.instance_id: each.description for each in answered if is_readable(each.description)}


class _Described(msgspec.Struct, frozen=True):
    """The part of a worker's description that doctor shows, which an older version may lack."""

    role: str | None = None
    strategy: str | None = None
    engine: str | None = None
    trtllm_version: str | None = None
    versions: dict[str, str | None] | None = None


def is_readable(description: Description) -> bool:
    """False for the answer of another program at a worker's endpoint."""
    try:
        msgspec.convert(description, _Described)
    except msgspec.ValidationError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    instance_id: int
    #: None where only the worker itself has it.
    role: str | None
    #: None where the worker could not be asked.
    description: Description | None = None
    #: Its process, if it runs on this machine.
    process: LocalProcess | None = None

    def __str__(self) -> str:
        return f"{self.role or 'worker'} {self.instance_id:x}"


@dataclass(frozen=True, slots=True)
class Repeats:
    """One prompt, sent again until the router had its blocks in the index, or the time was over."""

    last: Answer
    seconds: float


@dataclass(frozen=True, slots=True)
class Observed:
    url: str
    model: str
    #: The answer to a plain request.
    plain: Answer | ProbeFailedError
    #: The answer to a request that names this deployment's strategy, sent when `plain` stayed on one worker.
    ordered: Answer | ProbeFailedError | None = None
    repeats: Repeats | None = None
    #: None where the frontend does not list them.
    workers: tuple[ObservedWorker, ...] | None = None
    #: Why the workers have no description.
    undescribed: str = ""
    #: None when it runs elsewhere.
    frontend: LocalProcess | None = None
    #: The needs of starting one of its processes again, and the limits of this machine.
    needs: Needs = field(default_factory=Needs)
    limits: MachineLimits | None = None

    @property
    def crossing(self) -> Answer | ProbeFailedError:
        """The answer to the request that should have used both stages."""
        return self.plain if self.ordered is None else self.ordered


@dataclass(frozen=True, slots=True)
class Sources:
    """What `look` sees with."""

    frontend: FrontendClient
    #: Of this process: it may say where discovery is.
    environ: Mapping[str, str]
    listener: Callable[[str, int], LocalProcess | None] = listener
    limits: Callable[[Needs], MachineLimits] = MachineLimits.read
    describe: Callable[[str, Mapping[str, str]], Mapping[int, Description]] = describe


def look(sources: Sources, model: str | None, event_seconds: float, say: Say) -> Observed:
    """Raises ConfigError when there is no frontend, or it does not serve `model`."""
    frontend = sources.frontend
    name = _chosen(frontend.models(), model, frontend.url)
    sizes = frontend.sizes(name)
    prompt = fresh_prompt(sizes)
    say("sending a prompt as a client does")
    plain = _asked(frontend, name, prompt)
    instances = frontend.instances()
    ordered = repeats = None
    if isinstance(plain, Answer):
        if order := _order_to_ask_for(plain, instances or []):
            say(f"it stayed on one worker; asking for {order}")
            ordered = _asked(frontend, name, fresh_prompt(sizes), (f"disagg:{order}",))
        say("sending it again, until the router knows it")
        repeats = _repeated(frontend, name, prompt, event_seconds)
    say("asking the workers what they are")
    process = sources.listener(*frontend.address)
    process = process if process is not None and process.is_frontend else None
    workers, undescribed = _workers(sources, instances, plain, process)
    watches_files = _variables(process, sources.environ).get("DYN_DISCOVERY_BACKEND") == "file"
    needs = Needs(INOTIFY_PER_FRONTEND if watches_files else 0, peers=len(workers or ()))
    limits = sources.limits(needs) if process else None
    return Observed(frontend.url, name, plain, ordered, repeats, workers, undescribed, process, needs, limits)


def _chosen(models: list[str], wanted: str | None, url: str) -> str:
    if wanted is None and len(models) == 1:
        return models[0]
    if not models:
        raise ConfigError.bad_value("--url", url, "a frontend that serves a model; no worker is registered")
    if wanted in models:
        return wanted
    if wanted is None:
        raise ConfigError(f"--model is missing: {url} serves {', '.join(models)}")
    raise ConfigError.bad_value("--model", wanted, f"one of {', '.join(models)}")


def _asked(
    frontend: FrontendClient, model: str, prompt: str, annotations: tuple[str, ...] = ()
) -> Answer | ProbeFailedError:
    try:
        return frontend.ask(model, prompt, annotations)
    except ProbeFailedError as error:
        return error


def _order_to_ask_for(answer: Answer, instances: list[Instance]) -> str | None:
    """The order in which the worker that answered comes first, if it has kept the prompt to itself."""
    if answer.trace is None or answer.trace.strategy != LOCAL:
        return None
    role = _role(answer.decode_worker, instances)
    return next((order.name for order in orders() if order.entry_role == role), None)


def _repeated(frontend: FrontendClient, model: str, prompt: str, seconds: float) -> Repeats | None:
    """None when a request failed."""
    began = time.monotonic()
    while True:
        answer = _asked(frontend, model, prompt)
        waited = time.monotonic() - began
        if isinstance(answer, ProbeFailedError):
            return None
        if answer.hit_rate is None or answer.hit_rate > 0 or waited > seconds:
            return Repeats(answer, waited)
        time.sleep(_POLL_SECONDS)


def _workers(
    sources: Sources, instances: list[Instance] | None, plain: object, frontend: LocalProcess | None
) -> tuple[tuple[ObservedWorker, ...] | None, str]:
    """Those of the namespace that answered, and why they have no descriptions."""
    if instances is None:
        return None, "the frontend does not list its instances"
    namespaces = {each.namespace for each in instances if each.endpoint == "generate"}
    if isinstance(plain, Answer):
        answered = {i.namespace for i in instances if i.instance_id == plain.decode_worker}
        namespaces = answered or namespaces
    mine = [each for each in instances if each.namespace in namespaces and each.endpoint == "generate"]
    descriptions: dict[int, Description] = {}
    undescribed = ""
    try:
        for namespace in sorted(namespaces):
            descriptions |= sources.describe(namespace, _variables(frontend, sources.environ))
    except DisaggError as error:
        undescribed = str(error)

    def seen(instance_id: int) -> ObservedWorker:
        description = descriptions.get(instance_id)
        role = description.get("role") if description else _role(instance_id, mine)
        places = [each.address for each in mine if each.instance_id == instance_id and each.address]
        process = sources.listener(*places[0]) if frontend and places else None
        return ObservedWorker(instance_id, role, description, process)

    return tuple(seen(each) for each in sorted({each.instance_id for each in mine})), undescribed


def _role(instance_id: int | None, instances: list[Instance]) -> str | None:
    """The role, by the components at which others find the worker: an agg worker has decode's, not the shared one."""
    components = {each.component for each in instances if each.instance_id == instance_id}
    if COMPONENTS[Role.PREFILL] in components:
        return Role.PREFILL.value
    return Role.DECODE.value if components >= {COMPONENTS[Role.DECODE], SHARED_COMPONENT} else None


def _variables(process: LocalProcess | None, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of discovery: the frontend's own where it runs here, else those in `environ`."""
    source = environ if process is None else process.environ
    return {name: value for name, value in source.items() if _DISCOVERY.fullmatch(name)}
