"""Looks at workers: what each reports on its system port, and what the frontend says of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from trtllm_disagg.admin.commands import ADMIN_ROUTE, Command, Signer
from trtllm_disagg.errors import DisaggError, InvalidRequestError, PeerUnavailableError
from trtllm_disagg.tools.up.commands import Description
from trtllm_disagg.tools.up.http import ask, prompts
from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.tools.up.reconcile import Phase, takes_requests
from trtllm_disagg.wire.old_names import with_new_keys

_DESCRIBE_SECONDS = 2.0
#: Longer than a worker's grace period, in which all frontends remove it.
_COMMAND_SECONDS = 60.0
_FRONTEND_SECONDS = 5.0
#: Without an answer to the frontend after this time, a new revision counts as broken.
ANSWER_SECONDS = 60.0
#: States (worker/life.py) of a worker that finishes its requests.
_LEAVING_STATES = ("unlisted", "draining", "over")


@dataclass(frozen=True, slots=True)
class Described:
    """A worker with its own description."""

    instance: str
    description: Description
    #: Dynamo's; it found the worker.
    endpoint_id: str = ""

    def __str__(self) -> str:
        return f"{self.description.role} {self.instance}"


async def described(system_port: int) -> Described | None:
    """The description of the worker at this port; None for a version without one. Raises OSError without an answer."""
    status, body = await ask(_url(system_port), _DESCRIBE_SECONDS, {})
    if status != HTTPStatus.OK:
        return None
    try:
        said = json.loads(body)
        return Described(said["instance"], msgspec.convert(with_new_keys(said), Description))
    except (ValueError, KeyError, TypeError, msgspec.ValidationError):
        return None


async def command_worker(system_port: int, instance: str, signer: Signer, command: Command) -> dict[str, Any]:
    """Sends a command to the worker at this port, and returns its answer. Raises InvalidRequestError if it refuses,
    another DisaggError if it fails or does not answer.
    """
    drains: float = getattr(command, "seconds", 0.0)
    request = signer.request(command, int(instance, 16))
    try:
        _, body = await ask(_url(system_port), _COMMAND_SECONDS + drains, request)
        said = json.loads(body)
    except (OSError, ValueError) as error:
        raise PeerUnavailableError(f"no answer to {type(command).__name__.lower()}: {error}") from None
    if isinstance(said, dict) and isinstance(answer := said.get("answer"), dict):
        return answer
    refused = said.get("error") if isinstance(said, dict) else None
    if not isinstance(refused, dict):
        raise DisaggError(f"unexpected answer: {said!r:.200}")
    is_refusal = refused.get("code") == InvalidRequestError.category
    raise (InvalidRequestError if is_refusal else DisaggError)(str(refused.get("message")))


def _url(system_port: int) -> str:
    return f"http://{LOOPBACK}:{system_port}/engine/{ADMIN_ROUTE}"


async def frontend_knows(url: str, model: str, instance: int) -> bool | None:
    """Whether the frontend sends requests for a model to this instance. The query pins the worker and generates
    nothing: the frontend answers it only if it would send the request. None: it does not say
    (DYN_DISABLE_FRONTEND_NVEXT).
    """
    is_silent = False
    for path, body in _pinned(model, {"annotations": ["query_instance_id:"]}):
        try:
            status, answer = await ask(url + path, _FRONTEND_SECONDS, body, _pin(instance))
            said = json.loads(answer)
            is_silent |= status == 200 and "worker_id" not in (said.get("nvext") or {})
            if said["nvext"]["worker_id"]["decode_worker_id"] == instance:
                return True
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # not served there, or not by this worker
    return None if is_silent else False


async def frontend_answers(url: str, model: str, instance: int) -> str:
    """Empty if the frontend answers a one-token request by this instance, else the reason. A frontend that pairs stages
    itself takes no pin; its answer names the worker.
    """
    why = ""
    for path, body in _pinned(model, {}):
        for pin in (_pin(instance), {}):
            try:
                status, answer = await ask(url + path, _FRONTEND_SECONDS, body, pin)
                said = json.loads(answer)
                if status == 200 and said["choices"]:
                    if pin or said["nvext"]["worker_id"]["decode_worker_id"] == instance:
                        return ""
                    why = "another worker answers"
                elif status != 404 or not why:
                    why = f"status {status}: {answer.decode(errors='replace')[:200]}"
                if status != 400:
                    break
            except (OSError, ValueError, KeyError, TypeError) as error:
                why = why or str(error)
    return why


def _pinned(model: str, options: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    nvext = {"extra_fields": ["worker_id"], **options}
    for path, prompt in prompts("?").items():
        yield path, {"model": model, "max_tokens": 1, "nvext": nvext, **prompt}


def _pin(instance: int) -> dict[str, str]:
    return {"x-dynamo-worker-instance-id": str(instance)}


def phase_of(description: Description) -> Phase:
    if description.becomes or description.state in _LEAVING_STATES:
        return Phase.LEAVING
    return Phase.SERVING if description.ready else Phase.STARTING


@dataclass(slots=True)
class FirstStages:
    """The workers that get requests from the frontend, which is asked until it sends them."""

    #: Of the frontend; empty: unknown.
    url: str = ""
    #: Seconds until a frontend that is unknown, or does not list its workers, counts as knowing a worker.
    settle: float = 0.0
    #: (instance, whether of a new revision) -> since when the frontend is asked, and the reason why not; empty: it
    #: does.
    _asked: dict[tuple[str, bool], tuple[float, str]] = field(default_factory=dict)
    _first_asked: dict[str, float] = field(default_factory=dict)

    async def has(self, instance: str, description: Description, phase: Phase, *, is_new: bool) -> bool:
        key = instance, is_new
        if not (
            phase is Phase.SERVING
            and description.registered
            and takes_requests(description.role, description.strategy)
        ):
            self._asked.pop(key, None)  # as a later first stage, the frontend must find it again
            return False
        now = time.monotonic()
        since, why = self._asked.setdefault(key, (now, "not asked"))
        if why:
            waited = now - self._first_asked.setdefault(instance, now)
            why = await self.why_not(description.model, int(instance, 16), is_new, waited)
            self._asked[key] = since, why
        return not why

    async def why_not(self, model: str, instance: int, is_new: bool, waited: float) -> str:
        """Why the frontend sends an instance no requests; for a new revision, why it gets no answer from it. Empty: it
        does. `waited`: seconds since the first question.
        """
        if self.url and is_new:
            return await frontend_answers(self.url, model, instance)
        knows = await frontend_knows(self.url, model, instance) if self.url else None
        return "" if (waited >= self.settle if knows is None else knows) else "not known"

    def fault(self, instance: str) -> str:
        """Why an instance of a new revision counts as broken; empty if it does not."""
        since, why = self._asked.get((instance, True), (0.0, ""))
        if not why or time.monotonic() - since < ANSWER_SECONDS:
            return ""
        return f"the frontend gets no answer from it after {ANSWER_SECONDS:g} s: {why}"
