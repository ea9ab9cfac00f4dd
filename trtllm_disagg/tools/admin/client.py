"""The client of `switch`, `set`, `flip`, `scale` and `rollout`. The `up` of a run directory changes what it wants
(`wish`). Workers that no `up` has started, found by Dynamo's discovery, get commands signed with their key
(`change_fleet`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from trtllm_disagg.admin.commands import (
    Command,
    Describe,
    DescribedInstance,
    Description,
    Signer,
    UpCommand,
)
from trtllm_disagg.admin.keys import KEY_FILE, AdminKey
from trtllm_disagg.config.args import argument_parser_of, whereabouts_of
from trtllm_disagg.config.settings import namespace_of, not_negative
from trtllm_disagg.config.worker_config import SETTINGS, Role, flag_of
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.processes.steadily import without_silence
from trtllm_disagg.tools.admin.user_key import user_key
from trtllm_disagg.tools.up.command_socket import send_to_up
from trtllm_disagg.tools.up.plan import PLANES
from trtllm_disagg.tools.up.run_dir import is_alive, one_change_at_a_time, read_processes

Outcome = TypeVar("Outcome")
Say = Callable[[str], None]

KEY_FLAG = "--key-file"
_KEY_VARIABLE = SETTINGS["admin_key_file"].variables[0]
#: Longer than the grace period that a worker waits until all frontends have removed it.
_ANSWER_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="run directory of a running `up`")
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        help=f"without --run-dir: Dynamo namespace [{', '.join(SETTINGS['namespace'].variables)}]",
    )
    parser.add_argument(
        KEY_FLAG,
        type=Path,
        metavar="FILE",
        help=f"key of the workers, as in their {flag_of('admin_key_file')} (default: that in --run-dir, or "
        f"[{_KEY_VARIABLE}], or the one that the launch scripts make)",
    )


def require_one_place(args: argparse.Namespace) -> None:
    given = [f"no --{name}" for name in ("namespace", "frontend", "from") if getattr(args, name, None)]
    if args.run_dir is not None and given:
        raise ConfigError(f"--run-dir says where everything is; give {' and '.join(given)} with it")


def say(text: str) -> None:
    """Print progress to stderr; the outcome goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def add_timeout(parser: argparse.ArgumentParser, default: float | None, until: str) -> None:
    """With a run directory the time is that of the command: `up` goes on after it."""
    shown = "no limit" if default is None else "%(default)g"
    parser.add_argument(
        "--timeout", type=not_negative, default=default, metavar="SECONDS", help=f"{until} (default: {shown})"
    )
    parser.add_argument(
        "--undo",
        action="store_true",
        help="with --run-dir: after Ctrl-C or --timeout `up` takes back what is not done (default: it goes on)",
    )


def wish(args: argparse.Namespace, command: UpCommand) -> Any:
    """Have the `up` of --run-dir want what the command says, and wait until it is so. Returns its answer."""
    require_one_place(args)
    with without_silence(say, "waiting for `up`") as tell:
        return send_to_up(args.run_dir, command, tell, deadline=args.timeout, undo=args.undo)


def signer(args: argparse.Namespace) -> Signer:
    """The signer of commands to workers. Raises ConfigError when there is no key."""
    named = args.key_file or (args.run_dir and args.run_dir / KEY_FILE) or os.environ.get(_KEY_VARIABLE)
    path = Path(named) if named else user_key(os.environ)
    if not named and not path.exists():
        raise ConfigError(
            f"{KEY_FLAG} is missing: workers take commands only with their key, that of {flag_of('admin_key_file')}; "
            "give that file, or --run-dir for the workers of an `up`"
        )
    return Signer(AdminKey.read(path, KEY_FLAG))


@dataclass(frozen=True, slots=True)
class Worker:
    endpoint_id: str
    instance_id: int
    description: Description

    def __str__(self) -> str:
        return f"{self.description.role} {self.instance_id:x}"


class Workers(Protocol):
    """The part of `dynamo_runtime.Controller` that is used here."""

    async def workers(self) -> Sequence[DescribedInstance]: ...

    async def send(self, endpoint_id: str, instance_id: int, command: Command) -> dict[str, Any]: ...


async def all_workers(workers: Workers) -> list[Worker]:
    """All workers, described. Raises ConfigError when an instance is no worker of this package."""
    return [_worker(each) for each in await workers.workers()]


def _worker(instance: DescribedInstance) -> Worker:
    try:
        description = msgspec.convert(instance.description, Description)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"instance {instance.instance_id:x} at {instance.endpoint_id} is no trtllm-disagg worker: {error}"
        ) from None
    return Worker(instance.endpoint_id, instance.instance_id, description)


@dataclass
class Up:
    """The `up` of a deployment. Without a run directory it stands for that of workers which no `up` has started."""

    run_dir: Path | None = None

    def change_new_workers(self, command: UpCommand) -> None:
        """Start further workers with the strategy or the thresholds of `command`. Raises a DisaggError."""
        if self.run_dir is None:
            return
        try:
            send_to_up(self.run_dir, command, seconds=_ANSWER_SECONDS)
        except ConfigError as error:  # no wrong setting: this `up` answered before
            raise DisaggError(f"workers were changed, but `up` knows nothing of it: {error}") from None

    def starting(self) -> set[str]:
        """The names of its workers that are not ready yet."""
        return {
            each.name
            for each in (read_processes(self.run_dir) if self.run_dir else ())
            if each.role in set(Role) and each.state == "starting" and is_alive(each)
        }


#: The work of a command on the workers and their `up`.
Change = Callable[[Workers, Up], Awaitable[Outcome]]


def change_fleet(
    args: argparse.Namespace,
    change: Callable[[Workers], Awaitable[Outcome]],
    revisions: Iterable[str] = ("",),
    waits: str = "waiting for the workers",
) -> Outcome:
    """Run `change` on the workers of these revisions that discovery lists. `waits`: what a silence means; empty for a
    command that does not end. Returns what it returns. Raises ConfigError for a wrong setting.
    """
    where = where_of_fleet(args)
    namespaces = dict.fromkeys(namespace_of(where["namespace"], revision) for revision in revisions)
    return _connected(args, where, namespaces, change, waits)


def set_all(args: argparse.Namespace, change: Change[Outcome]) -> Outcome:
    """Run `change` on all workers of a deployment. No other `set` changes that of this run directory meanwhile."""
    if args.run_dir is None:
        return change_fleet(args, lambda workers: change(workers, Up()))
    require_one_place(args)
    with one_change_at_a_time(args.run_dir, partial(say, "waiting for another `set` of this deployment")):
        told = send_to_up(args.run_dir, Describe(), seconds=_ANSWER_SECONDS)
        os.environ["DYN_FILE_KV"] = told["discovery"]
        namespaces = (namespace_of(told["namespace"], told["revisions"][0]),)
        up = Up(args.run_dir)
        return _connected(
            args, PLANES, namespaces, lambda workers: change(workers, up), "waiting for the workers"
        )


def where_of_fleet(args: argparse.Namespace) -> Mapping[str, str]:
    """The values of WHEREABOUTS without a run directory. --namespace is a whole name: no suffix is added."""
    given = {"namespace": argument_parser_of("namespace")(args.namespace)} if args.namespace else {}
    return whereabouts_of(os.environ) | given


def _connected(
    args: argparse.Namespace,
    where: Mapping[str, str],
    namespaces: Iterable[str],
    change: Callable[[Workers], Awaitable[Outcome]],
    waits: str,
) -> Outcome:
    """`where`: the planes."""
    with_key = signer(args)

    async def run() -> Outcome:
        with quiet_runtime(os.environ):
            from trtllm_disagg.dynamo_runtime.controller import controller

            connecting = controller(
                backend=where["discovery_backend"],
                request_plane=where["request_plane"],
                event_plane=where["event_plane"],
                namespaces=namespaces,
                signer=with_key,
                timeout=_ANSWER_SECONDS,
            )
            async with connecting as workers:
                with without_silence(say, waits) if waits else nullcontext():
                    return await change(workers)

    return asyncio.run(run())


_STDERR = 2


@contextmanager
def quiet_runtime(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Inside the block, Python's output to stderr is shown, and the log of Dynamo's runtime is not.

    The runtime writes a line for each of its own requests at every level, `off` included, to descriptor 2. DYN_LOG
    suppresses only what it writes later, at the end of the process, so its module must be imported inside the block.
    A DYN_LOG that the user has set keeps the runtime's log.
    """
    if environ.get("DYN_LOG"):
        yield
        return
    before = environ.get("DYN_LOG")
    environ["DYN_LOG"] = "off"
    sys.stderr.flush()
    with os.fdopen(os.dup(_STDERR), "w", buffering=1) as ours, redirect_stderr(ours):
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(ours.fileno(), _STDERR)
            # The runtime has read the variable, and child processes must not inherit it.
            if before is None:
                del environ["DYN_LOG"]
            else:
                environ["DYN_LOG"] = before
