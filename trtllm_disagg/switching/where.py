"""Where a running deployment is: that of an `up`, by its run directory, or any other one, by Dynamo's discovery."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_disagg.deployment.orders import Describe, order

if TYPE_CHECKING:
    from trtllm_disagg.runtime import Controller

#: A worker that leaves waits until all frontends have heard of it.
_ANSWER_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="run directory of a running `up`")
    parser.add_argument(
        "--namespace", metavar="NAME", help="without --run-dir: Dynamo namespace [DYN_NAMESPACE]"
    )


def describe_up(run_dir: Path | None) -> dict[str, Any] | None:
    """What an `up` says of itself; None when there is none to ask. Raises ConfigError when nobody is there."""
    return order(run_dir, Describe()) if run_dir is not None else None


@asynccontextmanager
async def workers_of(up: dict[str, Any] | None, namespace: str | None) -> AsyncIterator[Controller]:
    from trtllm_disagg.runtime import controller

    if up is not None:
        os.environ["DYN_FILE_KV"] = up["discovery"]
        namespace = up["namespace"]
    async with controller(
        backend="file" if up else os.environ.get("DYN_DISCOVERY_BACKEND") or "file",
        request_plane="tcp" if up else os.environ.get("DYN_REQUEST_PLANE") or "tcp",
        event_plane="zmq" if up else os.environ.get("DYN_EVENT_PLANE") or "zmq",
        namespace=namespace or os.environ.get("DYN_NAMESPACE") or "dynamo",
        timeout=_ANSWER_SECONDS,
    ) as workers:
        yield workers
