"""What is: what each worker says of itself, on its system port, and what the frontend says of a worker."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trtllm_disagg.admin.commands import ADMIN_ROUTE, Command, Description, Signer
from trtllm_disagg.errors import DisaggError, InvalidRequestError, PeerUnavailableError
from trtllm_disagg.tools.up.http import ask
from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.tools.up.reconcile import Phase, Seen, takes_requests

_DESCRIBE_SECONDS = 2.0
#: Longer than the grace period that a worker waits until all frontends have removed it.
_COMMAND_SECONDS = 60.0
_FRONTEND_SECONDS = 5.0
#: After that a new revision without an answer to the frontend counts as broken.
ANSWER_SECONDS = 60.0
#: A worker's states (worker/life.py) in which it finishes its requests.
_LEAVING_STATES = ("unlisted", "draining", "over")


class Described(msgspec.Struct, frozen=True):
    """A worker's own description."""

    instance: str
    description: Description


async def described(system_port: int) -> Described | None:
    """What the worker at this port says of itself; None for one of another version, which says nothing there. Raises
    OSError when it does not answer now.
    """
    status, body = await ask(_url(system_port), _DESCRIBE_SECONDS, {})
    try:
        said = json.loads(body)
        return Described(said["instance"], msgspec.convert(said, Description)) if status == 200 else None
    except (ValueError, KeyError, TypeError, msgspec.ValidationError):
        return None


async def command_worker(system_port: int, instance: str, signer: Signer, command: Command) -> dict[str, Any]:
    """Has the worker at this port execute a command, and returns its answer. Raises InvalidRequestError where it
    refuses, another DisaggError where it fails or does not answer.
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
        raise DisaggError(f"an answer that is none: {said!r:.200}")
    is_refusal = refused.get("code") == InvalidRequestError.category
    raise (InvalidRequestError if is_refusal else DisaggError)(str(refused.get("message")))


def _url(system_port: int) -> str:
    return f"http://{LOOPBACK}:{system_port}/engine/{ADMIN_ROUTE}"


#: A model may be served at one of the two paths only.
_PROMPTS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "?"},
    "chat/completions": {"messages": [{"role": "user", "content": "?"}]},
}


async def frontend_knows(url: str, model: str, instance: int) -> bool | None:
    """Whether the frontend sends requests for a model to the worker with that instance id. The query pins the worker
    and generates no token: the frontend answers only where it would send the request, and refuses a pin to a worker
    that it does not know. None: it does not say (DYN_DISABLE_FRONTEND_NVEXT).
    """
    is_silent = False
    for path, body in _pinned(model, {"annotations": ["query_instance_id:"]}):
        try:
            status, answer = await ask(f"{url}/v1/{path}", _FRONTEND_SECONDS, body, _pin(instance))
            said = json.loads(answer)
            is_silent |= status == 200 and "worker_id" not in (said.get("nvext") or {})
            if said["nvext"]["worker_id"]["decode_worker_id"] == instance:
                return True
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # not served there, or not by this worker
    return None if is_silent else False


async def frontend_answers(url: str, model: str, instance: int) -> str:
    """Empty when the frontend answers a request, of one token, by the worker with that instance id; else why not. Where
    it makes the pairs itself it takes no such pin: then the answer says which worker made it.
    """
    why = ""
    for path, body in _pinned(model, {}):
        for pin in (_pin(instance), {}):
            try:
                status, answer = await ask(f"{url}/v1/{path}", _FRONTEND_SECONDS, body, pin)
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
    for path, prompt in _PROMPTS.items():
        yield path, {"model": model, "max_tokens": 1, "nvext": nvext, **prompt}


def _pin(instance: int) -> dict[str, str]:
    return {"x-dynamo-worker-instance-id": str(instance)}


def phase_of(told: Description) -> Phase:
    if told.becomes or told.state in _LEAVING_STATES:
        return Phase.LEAVING
    return Phase.SERVING if told.ready else Phase.STARTING


def seen(
    name: str, told: Description, phase: Phase, *, answers: bool, is_busy: bool, fault: str = ""
) -> Seen:
    """A worker that describes itself."""
    return Seen(
        name,
        told.role.value,
        phase,
        told.strategy,
        told.revision or "",
        becomes=told.becomes if phase is Phase.LEAVING else "",
        is_registered=told.registered,
        answers=answers,
        requests=told.whole_requests,
        fault=fault,
        is_busy=is_busy,
    )


#: Why the frontend does not send requests for a model to an instance; of a new revision: why it got no answer from it.
#: Empty: it does.
WhyNot = Callable[[str, int, bool], Awaitable[str]]


def as_frontend_says(url: str, settle: float) -> WhyNot:
    """`settle`: seconds after which a frontend that does not say whom it knows counts as knowing a worker."""
    otherwise = as_assumed_after(settle)

    async def why_not(model: str, instance: int, is_new: bool) -> str:
        if is_new:
            return await frontend_answers(url, model, instance)
        knows = await frontend_knows(url, model, instance)
        return await otherwise(model, instance, is_new) if knows is None else "" if knows else "not known"

    return why_not


def as_assumed_after(seconds: float) -> WhyNot:
    """For frontends with unknown addresses: each counts as knowing a worker `seconds` after the first question."""
    asked_at: dict[int, float] = {}

    async def why_not(model: str, instance: int, is_new: bool) -> str:
        now = time.monotonic()
        return "" if now - asked_at.setdefault(instance, now) >= seconds else "not known yet"

    return why_not


@dataclass(slots=True)
class FirstStages:
    """Those that the frontend sends requests to. It is asked until it says so."""

    why_not: WhyNot
    #: Instances, and whether they were of a new revision then.
    _confirmed: set[tuple[str, bool]] = field(default_factory=set)
    #: Since when the frontend has been asked for one, and why it did not last.
    _asked: dict[tuple[str, bool], tuple[float, str]] = field(default_factory=dict)

    async def has(self, instance: str, told: Description, phase: Phase, *, is_new: bool) -> bool:
        key = instance, is_new
        is_first = phase is Phase.SERVING and told.registered and takes_requests(told.role, told.strategy)
        if not is_first:  # when it is one again, the frontend has to learn of it again
            self._confirmed.discard(key)
            self._asked.pop(key, None)
        if not is_first or key in self._confirmed:
            return is_first
        since, _ = self._asked.setdefault(key, (time.monotonic(), ""))
        why = await self.why_not(told.model, int(instance, 16), is_new)
        self._asked[key] = since, why
        if not why:
            self._confirmed.add(key)
        return not why

    def fault(self, instance: str) -> str:
        """Why an instance of a new revision counts as broken."""
        since, why = self._asked.get((instance, True), (0.0, ""))
        if not why or time.monotonic() - since < ANSWER_SECONDS:
            return ""
        return f"the frontend gets no answer from it after {ANSWER_SECONDS:g} s: {why}"
