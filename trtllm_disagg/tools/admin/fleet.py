"""Changes workers that another program starts: finds them by Dynamo's discovery and sends each its commands. Starts no
worker. An interrupted command stops halfway; the same command then continues.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from trtllm_disagg.admin.commands import Command, DescribedInstance, Flip, Set, Signer, Switch
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.common.steadily import without_silence
from trtllm_disagg.config.args import argument_parser_of, whereabouts_of
from trtllm_disagg.config.settings import namespace_of
from trtllm_disagg.config.worker_config import SETTINGS, flag_of
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.admin.user_key import user_key
from trtllm_disagg.tools.flag_types import not_negative
from trtllm_disagg.tools.up import reconcile as steps
from trtllm_disagg.tools.up.commands import Description, Rollout, Scale
from trtllm_disagg.tools.up.keeper import Keeper, Say
from trtllm_disagg.tools.up.look import Described, FirstStages, phase_of
from trtllm_disagg.tools.up.reconcile import Phase, Seen, Step, Wanted
from trtllm_disagg.tools.up.supervisor import first_completed
from trtllm_disagg.tools.up.wishes import Wish, WishCommand
from trtllm_disagg.wire.old_names import with_new_keys

Outcome = TypeVar("Outcome")

KEY_FLAG = "--key-file"
KEY_VARIABLE = SETTINGS["admin_key_file"].variables[0]
#: Longer than a worker's grace period, in which all frontends remove it.
_ANSWER_SECONDS = 60.0
#: Each command takes only its own steps, even after another one that was interrupted.
_STEPS: Mapping[type, tuple[type[Step], ...]] = {
    Flip: (steps.Flip,),
    Switch: (steps.Switch,),
    Rollout: (steps.Adopt, steps.Stop),
    Set: (steps.Set,),
    Scale: (steps.Flip,),
}


def say(text: str) -> None:
    """Prints progress to stderr; the outcome goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def add_frontend(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--frontend", metavar="URL", help="without --run-dir: frontend that must know the new first stage")
    add(
        "--settle",
        type=not_negative,
        default=5.0,
        metavar="SECONDS",
        help="without --frontend: time until all frontends know the new first stage (default: %(default)g)",
    )


class Workers(Protocol):
    """The part of `dynamo_runtime.Controller` that these commands use."""

    async def workers(self) -> Sequence[DescribedInstance]: ...

    async def send(self, endpoint_id: str, instance_id: int, command: Command) -> dict[str, Any]: ...


async def all_workers(workers: Workers) -> list[Described]:
    """Describes all workers. Raises ConfigError when an instance is no worker of this package."""
    found = []
    for each in await workers.workers():
        instance = f"{each.instance_id:x}"
        try:
            description = msgspec.convert(with_new_keys(each.description), Description)
        except msgspec.ValidationError as error:
            which = f"instance {instance} at {each.endpoint_id}"
            raise ConfigError(f"{which} is not a trtllm-disagg worker: {error}") from None
        found.append(Described(instance, description, each.endpoint_id))
    return found


class FleetKeeper(Keeper):
    """A worker keeps its name from the first look, even after a flip gives it another role and instance id."""

    def __init__(
        self, workers: Workers, wanted: Wanted, first_stages: FirstStages, takes: tuple[type[Step], ...]
    ) -> None:
        super().__init__(wanted, first_stages, asyncio.Event())
        self._workers = workers
        self._takes = takes
        #: Instance id -> name.
        self._names: dict[str, str] = {}
        self._there: dict[str, Described] = {}
        self._leaving: set[str] = set()

    @property
    def model(self) -> str:
        return next(each.description.model for each in self._there.values())

    async def _look(self) -> list[Seen]:
        self._there = {self._name(each): each for each in await all_workers(self._workers)}
        return [await self._described(name, each, self._phase(name)) for name, each in self._there.items()]

    def _name(self, each: Described) -> str:
        before = self._names.get(each.description.flipped_from, str(each))
        return self._names.setdefault(each.instance, before)

    def _phase(self, name: str) -> Phase:
        return Phase.LEAVING if name in self._leaving else phase_of(self._there[name].description)

    def _take(self, step: Step) -> None:
        if isinstance(step, self._takes) and not any(each.error for each in self._changes):
            super()._take(step)

    async def _stop(self, one: Seen, drain_seconds: float | None) -> None:
        self._leaving.add(one.name)
        try:
            await super()._stop(one, drain_seconds)
        finally:
            self._leaving.remove(one.name)

    async def _send(self, one: Seen, command: Command) -> dict[str, Any]:
        there = self._there[one.name]
        return await self._workers.send(there.endpoint_id, int(there.instance, 16), command)


async def change(
    workers: Workers,
    command: WishCommand,
    limit: float,
    key: str,
    first_stages: FirstStages,
    old: str = "",
    report: Say = say,
) -> Any:
    """Sends the command, waits until the workers are as it says, and returns its outcome as JSON.

    `key`: id of this process's key. `old`: the revision that a rollout replaces. Raises ConfigError before any worker
    changes, and what `Wish.come_true` raises.
    """
    there = await all_workers(workers)
    is_rollout = isinstance(command, Rollout)
    if not there and not is_rollout:
        raise ConfigError("no workers found; wait until one is ready, or give its --run-dir or --namespace")
    others = [f"{each} ({each.description.key})" for each in there if each.description.key not in (None, key)]
    if others:
        allowed = f"the key that all workers have; these have another: {', '.join(others)}"
        raise ConfigError.bad_value(KEY_FLAG, key, allowed)
    require_no_up(there)
    strategy = next((each.description.strategy for each in there), "decode_first")
    wanted = Wanted(strategy, old if is_rollout else there[0].description.revision or "")
    keeper = FleetKeeper(workers, wanted, first_stages, _STEPS[type(command)])
    return await first_completed(Wish(keeper, report, limit).come_true(command), keeper.keep())


def require_no_up(there: Iterable[Described]) -> None:
    """Raises ConfigError for a worker that an `up` keeps: it would take the change back."""
    for each in there:
        if name := each.description.process:
            raise ConfigError(f"{each} is {name} of an `up`; give the --run-dir of that `up`, on its machine")


def send(args: argparse.Namespace, command: WishCommand) -> Any:
    """`change` of the workers in discovery. Raises ConfigError for a wrong setting."""
    old = getattr(args, "from", None) or ""
    revisions = (old, command.revision) if isinstance(command, Rollout) else ("",)
    url = getattr(args, "frontend", None) or ""
    first_stages = FirstStages(url.rstrip("/"), getattr(args, "settle", 0.0))

    async def work(workers: Workers, key: str) -> Any:
        return await change(workers, command, args.timeout, key, first_stages, old)

    return connected(args, work, revisions)


def connected(
    args: argparse.Namespace,
    work: Callable[[Workers, str], Awaitable[Outcome]],
    revisions: Iterable[str] = ("",),
    waits: str = "waiting for the workers",
) -> Outcome:
    """Runs `work` on the workers of these revisions, with the key's id. `waits`: printed during a silence; empty for a
    command that runs until Ctrl-C. Raises ConfigError for a wrong setting.
    """
    where = where_of(args)
    namespaces = dict.fromkeys(namespace_of(where["namespace"], revision) for revision in revisions)
    signer = _signer(args)

    async def run() -> Outcome:
        with quiet_runtime(os.environ):
            from trtllm_disagg.tools.admin.controller import controller

            async with controller(where, namespaces, signer, _ANSWER_SECONDS) as workers:
                with without_silence(say, waits) if waits else nullcontext():
                    return await work(workers, signer.key_id)

    return asyncio.run(run())


def where_of(args: argparse.Namespace) -> Mapping[str, str]:
    """The values of WHEREABOUTS. --namespace already includes any suffix."""
    given = {"namespace": argument_parser_of("namespace")(args.namespace)} if args.namespace else {}
    return whereabouts_of(os.environ) | given


def _signer(args: argparse.Namespace) -> Signer:
    """Raises ConfigError when there is no key."""
    named = args.key_file or os.environ.get(KEY_VARIABLE)
    path = Path(named) if named else user_key(os.environ)
    if not named and not path.exists():
        raise ConfigError(
            f"{KEY_FLAG} is missing; give the file of the workers' {flag_of('admin_key_file')}, "
            "or --run-dir for the workers of an `up`"
        )
    return Signer(AdminKey.read(path, KEY_FLAG))


_STDERR = 2


@contextmanager
def quiet_runtime(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Inside the block, shows Python's stderr and hides the log of Dynamo's runtime, unless the user has set DYN_LOG.

    The runtime writes a line per request to descriptor 2 at every level, even `off`. DYN_LOG suppresses only its later
    lines, those at exit, so import the runtime inside the block.
    """
    if environ.get("DYN_LOG"):
        yield
        return
    environ["DYN_LOG"] = "off"
    sys.stderr.flush()
    with os.fdopen(os.dup(_STDERR), "w", buffering=1) as ours, redirect_stderr(ours):
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(ours.fileno(), _STDERR)
            del environ["DYN_LOG"]  # read by now; child processes must not inherit it
