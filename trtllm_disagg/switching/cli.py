"""`trtllm-disagg switch`: flags, and where the deployment is."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

from trtllm_disagg.control import SWITCHABLE
from trtllm_disagg.deployment.orders import Switched, order
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.signed_command import Signer
from trtllm_disagg.switching import where
from trtllm_disagg.switching.frontend import Frontend, HttpFrontend, UnknownFrontends
from trtllm_disagg.switching.plan import require_switchable
from trtllm_disagg.switching.run import switch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    # Not `choices`: a refusal says why, too.
    add(
        "--to",
        required=True,
        metavar="{" + ",".join(SWITCHABLE) + "}",
        help="the strategy to run from now on",
    )
    where.add_arguments(parser)
    add(
        "--frontend",
        metavar="URL",
        help="without --run-dir: a frontend to ask when it knows the new first stage",
    )
    add(
        "--settle",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="without any frontend to ask: how long they get to learn of it (default: %(default)g)",
    )
    add(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for each step (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 when switched, 1 when it failed on the way, 2 when a setting is wrong."""
    require_switchable(args.to)
    if args.run_dir is not None and (args.namespace or args.frontend):
        raise ConfigError("--run-dir says where everything is; give no --namespace and no --frontend with it")
    up = where.describe_up(args.run_dir)
    signer = where.signer(args.run_dir, args.key_file, os.environ)
    try:
        print(asyncio.run(_switch(args, up, signer)))
        if up is not None:
            order(args.run_dir, Switched(args.to))
    except ConfigError:
        raise
    except DisaggError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _switch(args: argparse.Namespace, up: dict[str, Any] | None, signer: Signer) -> str:
    async with where.workers_of(up, args.namespace, signer) as workers:
        return await switch(workers, _frontend(args, up), args.to, args.timeout, _say)


def _frontend(args: argparse.Namespace, up: dict[str, Any] | None) -> Frontend:
    url = up["url"] if up else args.frontend
    return HttpFrontend(url.rstrip("/")) if url else UnknownFrontends(args.settle)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
