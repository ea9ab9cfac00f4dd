"""What has to hold for a deployment that serves: one function a finding, in `FINDINGS`. Each says "not known" where it
has not seen enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.dev_shm import DIRECTORY, in_mib
from trtllm_disagg.processes.limits import (
    INOTIFY_KEY,
    LOCKED_MEMORY,
    OPEN_FILES_LIMIT,
    PTRACE_SCOPE,
    MachineLimits,
    shortages,
)
from trtllm_disagg.strategies import STRATEGIES
from trtllm_disagg.tools.doctor.diagnosis import FINE, UNKNOWN
from trtllm_disagg.tools.doctor.frontend import Answer, ProbeFailedError
from trtllm_disagg.tools.doctor.live import LOCAL, Observed, ObservedWorker
from trtllm_disagg.tools.doctor.rules import Severity
from trtllm_disagg.tools.doctor.this_machine import LocalProcess
from trtllm_disagg.worker.pairing import require_pair


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    #: ok, note, error or not known.
    verdict: str
    value: str
    why: str
    #: What to do; empty when it is ok.
    instead: str = ""


class _Rule(NamedTuple):
    name: str
    why: str

    def fine(self, value: str) -> Finding:
        return Finding(self.name, FINE, value, self.why)

    def note(self, value: str, instead: str) -> Finding:
        return Finding(self.name, Severity.NOTE.value, value, self.why, instead)

    def error(self, value: str, instead: str) -> Finding:
        return Finding(self.name, Severity.ERROR.value, value, self.why, instead)

    def unknown(self, instead: str, value: str = "") -> Finding:
        return Finding(self.name, UNKNOWN, value, self.why, instead)


Find = Callable[[Observed], Iterable[Finding]]


def findings(seen: Observed) -> list[Finding]:
    return [finding for find in FINDINGS for finding in find(seen)]


def _answers(seen: Observed) -> Iterator[Finding]:
    rule = _Rule("answers", "all else is read from the answers to requests")
    if isinstance(seen.plain, ProbeFailedError):
        yield rule.error("no", f"{seen.plain}; the logs of the frontend and of the workers say more")
    else:
        yield rule.fine(f"{seen.model}, a prompt of {seen.plain.prompt_tokens} tokens")


def _workers(seen: Observed) -> Iterator[Finding]:
    rule = _Rule("workers", "a request crosses both stages only while there is a worker of each role")
    if seen.workers is None:
        yield rule.unknown("the frontend has no list of instances at /health")
        return
    value = ", ".join(map(str, seen.workers)) or "none"
    roles = {worker.role for worker in seen.workers}
    missing = {Role.PREFILL.value, Role.DECODE.value} - roles
    is_one_role = len(missing) == 1 and None not in roles
    if not seen.workers or is_one_role:
        start = " and ".join(sorted(missing))
        yield rule.error(value, f"start a {start} worker, or look into its log")
    elif silent := _silent(seen):
        instead = f"{', '.join(map(str, silent))}: listed, and without an answer; look into the log"
        yield rule.error(value, instead)
    else:
        yield rule.fine(value)


def _described(seen: Observed) -> list[ObservedWorker]:
    return [worker for worker in seen.workers or () if worker.description is not None]


def _silent(seen: Observed) -> list[ObservedWorker]:
    """Workers that are listed but do not answer, where discovery could be asked: dead, frozen, or out of reach."""
    could_ask = not seen.undescribed or _described(seen)
    return [worker for worker in seen.workers or () if could_ask and worker.description is None]


def _undescribed(rule: _Rule, seen: Observed) -> Finding:
    how = (
        "run doctor on the machine of the frontend, as its user, or with its discovery in the environment "
        "(DYN_DISCOVERY_BACKEND, ETCD_ENDPOINTS)"
    )
    return rule.unknown(f"{seen.undescribed or 'no worker describes itself'}; {how}")


def _pair(seen: Observed) -> Iterator[Finding]:
    rule = _Rule("pair", "KV and handoffs of one worker have to mean the same to the other one")
    described = _described(seen)
    prefills, decodes = ([w for w in described if w.role == role] for role in (Role.PREFILL, Role.DECODE))
    if not described:
        yield _undescribed(rule, seen)
        return
    if not prefills or not decodes:
        if {worker.role for worker in described} != {Role.AGG}:
            yield rule.unknown("no two workers of both roles describe themselves")
        return
    wrong: dict[str, None] = {}
    for prefill, decode in product(prefills, decodes):
        try:
            require_pair(prefill.description or {}, decode.description or {})
        except ConfigError as error:
            wrong[str(error)] = None
    if wrong:
        yield rule.error("do not fit", "; ".join(wrong))
    else:
        count = len(prefills) * len(decodes)
        yield rule.fine(f"{count} of {count} fit")


def _versions(seen: Observed) -> Iterator[Finding]:
    rule = _Rule("versions", "a handoff is written by one version and read by another")
    described = _described(seen)
    if not described:
        yield _undescribed(rule, seen)
        return
    versions = {_version_of(worker) for worker in described}
    if any(UNKNOWN in version for version in versions):
        yield rule.unknown("a worker of an older trtllm-disagg is there", "; ".join(sorted(versions)))
    elif len(versions) > 1:
        each = "; ".join(f"{worker}: {_version_of(worker)}" for worker in described)
        yield rule.note(each, "one version of everything on all workers")
    else:
        yield rule.fine(versions.pop())


def _version_of(worker: ObservedWorker) -> str:
    said = worker.description or {}
    versions = said.get("versions") or {}
    names = {"trtllm-disagg": "trtllm_disagg", "ai-dynamo": "ai_dynamo"}
    parts = [f"{shown} {versions.get(key) or UNKNOWN}" for shown, key in names.items()]
    engine = said.get("engine") or UNKNOWN
    return ", ".join([*parts, f"engine {engine} {said.get('trtllm_version') or ''}".strip()])


def _order(seen: Observed) -> Iterator[Finding]:
    rule = _Rule(
        "order", "what a worker was started with is not what a request meets when something is missing"
    )
    if isinstance(seen.plain, ProbeFailedError):
        return
    trace = seen.plain.trace
    if trace is None or not trace.strategy:
        yield rule.unknown("the answer has no engine_data.disagg: these are no workers of this project")
        return
    value = f"{trace.strategy} ({trace.reason})"
    declared = {
        w.description["strategy"]
        for w in _described(seen)
        if w.description
        and "strategy" in w.description
        and w.role != Role.AGG  # which has no use for its own
    }
    is_declared = not declared or trace.strategy in declared or "auto" in declared
    if trace.fallbacks:
        yield rule.error(value, "the request took another way: " + "; ".join(trace.fallbacks))
    elif trace.strategy == LOCAL:
        stays = f"a prompt of {seen.plain.prompt_tokens} tokens stays on the worker that has it"
        yield rule.note(value, f"{stays} (docs/reference/deciders.md)")
    elif not is_declared:
        yield rule.note(value, f"the workers say {', '.join(sorted(declared))}")
    else:
        yield rule.fine(value)


def _is_one_stage(seen: Observed) -> bool:
    trace = seen.plain.trace if isinstance(seen.plain, Answer) else None
    return (
        trace is not None and trace.strategy in STRATEGIES and not STRATEGIES[trace.strategy].is_disaggregated
    )


def _stages(seen: Observed) -> Iterator[Finding]:
    """One request, and its KV."""
    rule = _Rule(
        "both stages", "a first stage that answers alone looks healthy, and is twice as loaded as planned"
    )
    kv = _Rule("KV moved", "a decode worker without the KV computes the prompt once more")
    answer = seen.crossing
    if isinstance(seen.plain, ProbeFailedError) or _is_one_stage(seen):
        return
    if isinstance(answer, ProbeFailedError):
        yield rule.error("no answer", str(answer))
        return
    moved = answer.trace.kv_transfer_bytes if answer.trace else None
    others = _other_stage(answer)
    if others or moved:
        yield rule.fine(others or "yes, through the prefill queue")
    elif answer.trace is None:
        yield rule.unknown("the answer does not name its workers")
        return
    else:
        because = "; ".join(answer.trace.fallbacks) or f"reason: {answer.trace.reason}"
        yield rule.error("one worker did both", f"look why the other stage was not called; {because}")
        return
    if moved:
        yield kv.fine(f"{moved:,} bytes")
    elif moved == 0:
        yield kv.error("0 bytes", "look into the decode worker's log for the transfer")
    else:
        yield kv.unknown(
            "the engine has not measured the transfer: --publish-metrics on the workers; some of TensorRT-LLM's "
            "transceivers never do",
        )


def _other_stage(answer: Answer) -> str:
    """The worker of the second stage, if the answer names it."""
    trace = answer.trace
    if trace is not None and not trace.fallbacks:
        for role, named in ((Role.PREFILL, trace.prefill_instance), (Role.DECODE, trace.decode_instance)):
            if named:
                return f"yes, {role.value} {named}"
    chosen = answer.prefill_worker, answer.decode_worker
    if None not in chosen and chosen[0] != chosen[1]:
        return f"yes, prefill {chosen[0]:x} and decode {chosen[1]:x}"
    return ""


def _events(seen: Observed) -> Iterator[Finding]:
    rule = _Rule(
        "KV events", "the router sends a prompt to the worker that has its beginning, if it hears of blocks"
    )
    if seen.repeats is None:
        return
    last, waited = seen.repeats.last, f"{seen.repeats.seconds:.1f} s"
    if _only_guesses(seen):
        yield rule.note("not used", "the frontend runs with --no-router-kv-events")
    elif last.hit_rate is None:
        yield rule.note("not used", "the frontend does not route by KV cache: --router-mode kv")
    elif last.hit_rate > 0:
        yield rule.fine(f"the router found {last.hit_rate:.0%} of the blocks after {waited}")
    elif last.cached_tokens:
        yield rule.error(
            f"none after {waited}; the worker reused {last.cached_tokens} tokens",
            "--publish-kv-events on the workers of the first stage; its port open to the frontend (DYN_EVENT_PLANE)",
        )
    else:
        yield rule.error(
            f"none after {waited}, and no block was reused",
            "kv_cache_config.enable_block_reuse: true, and --publish-kv-events on the workers of the first stage",
        )


def _only_guesses(seen: Observed) -> bool:
    frontend = seen.frontend
    if frontend is None:
        return False
    off = frontend.environ.get("DYN_ROUTER_USE_KV_EVENTS", "").lower() in ("false", "0", "no", "off")
    return "--no-router-kv-events" in frontend.argv or off


_LIMITS = (
    _Rule(OPEN_FILES_LIMIT, "each connection is an open file, and so is each file of a model"),
    _Rule(LOCKED_MEMORY, "KV that moves by RDMA is locked as a whole"),
    _Rule(
        INOTIFY_KEY,
        "each process that watches files of discovery takes some; one that finds none does not start",
    ),
    _Rule(
        str(DIRECTORY),
        "UCX, under NIXL, keeps its queues there; a process that finds no room dies of a signal",
    ),
    _Rule(PTRACE_SCOPE, "NIXL on one host reads another process's memory"),
)


def _host(seen: Observed) -> Iterator[Finding]:
    if seen.limits is None:
        where = "the frontend runs on another machine, or as another user; run doctor there"
        yield from (rule.unknown(where) for rule in _LIMITS)
        return
    limits = _in_force(seen, seen.limits)
    found = {shortage.about: shortage for shortage in shortages(seen.needs, limits)}
    values = _values(seen, limits)
    for rule in _LIMITS:
        value, shortage = values[rule.name], found.get(rule.name)
        if shortage is not None:
            yield (rule.error if shortage.is_certain else rule.note)(value, shortage.sentence)
        else:
            yield rule.unknown("this system does not tell") if value == UNKNOWN else rule.fine(value)
    silent = _silent(seen)
    if elsewhere := [str(w) for w in seen.workers or () if w.process is None and w not in silent]:
        others = _Rule("other hosts", "the limits above are this machine's")
        yield others.unknown(
            "run doctor on the machines of these workers too, as their user", ", ".join(elsewhere)
        )


def _processes(seen: Observed) -> list[LocalProcess]:
    return [each for each in (seen.frontend, *(w.process for w in seen.workers or ())) if each is not None]


def _in_force(seen: Observed, limits: MachineLimits) -> MachineLimits:
    """What its processes run under, instead of what a new one would."""
    processes = _processes(seen)
    return replace(
        limits,
        max_open_files=_least(each.max_open_files for each in processes),
        max_locked_memory=_least(each.max_locked_memory for each in processes) if limits.has_rdma else None,
    )


def _least(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _values(seen: Observed, limits: MachineLimits) -> dict[str, str]:
    used = max((each.open_files or 0 for each in _processes(seen)), default=0)
    inotify = UNKNOWN
    if limits.max_inotify_instances is not None and limits.free_inotify_instances is not None:
        least = "at least " if limits.free_inotify_instances >= seen.needs.inotify_instances else ""
        inotify = f"{least}{limits.free_inotify_instances} of {limits.max_inotify_instances} free"
    if not seen.needs.inotify_instances:
        inotify = "none needed: discovery is not in files"
    locked = "no RDMA here"
    if limits.has_rdma:
        locked = (
            "unlimited" if limits.max_locked_memory is None else f"{limits.max_locked_memory // 1024} KiB"
        )
    shared = limits.free_shared_memory
    return {
        OPEN_FILES_LIMIT: f"{used} of {limits.max_open_files or 'unlimited'}",
        LOCKED_MEMORY: locked,
        INOTIFY_KEY: inotify,
        str(DIRECTORY): UNKNOWN if shared is None else f"{in_mib(shared)} free",
        PTRACE_SCOPE: "no Yama" if limits.ptrace_scope is None else str(limits.ptrace_scope),
    }


FINDINGS: tuple[Find, ...] = (_answers, _workers, _pair, _versions, _order, _stages, _events, _host)
