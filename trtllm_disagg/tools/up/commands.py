"""The commands that `up` executes, from a socket in its run directory that only its user may open, and the part of a
worker's description that they need.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from trtllm_disagg.admin.commands import Flip, Set, Switch
from trtllm_disagg.config.settings import MAX_SECONDS
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError


class Describe(msgspec.Struct, frozen=True, tag_field="command", tag="describe", forbid_unknown_fields=True):
    """Asks for the deployment's description. (Workers give theirs to every caller.)"""


class Scale(msgspec.Struct, frozen=True, tag_field="command", tag="scale", forbid_unknown_fields=True):
    """The number of workers by role."""

    workers: dict[str, int]
    #: First flip workers; then start the missing ones and stop the surplus.
    by_flips: bool = False


class Undo(msgspec.Struct, frozen=True, tag_field="command", tag="undo", forbid_unknown_fields=True):
    """On the connection of an unfinished command: takes that command's wish back."""


class Rollout(msgspec.Struct, frozen=True, tag_field="command", tag="rollout", forbid_unknown_fields=True):
    """Replaces all workers by workers of `revision`, started with the nonempty fields. The current revision undoes a
    running rollout.
    """

    revision: str
    model: str = ""
    #: Role -> path of its engine file.
    engine_configs: dict[str, str] = {}
    #: The new workers' interpreter.
    python: str = ""
    worker_args: tuple[str, ...] = ()
    #: The old workers' time to drain.
    drain_seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = 600.0
    #: Replace one worker at a time, on the same GPUs.
    in_place: bool = False


UpCommand = Describe | Switch | Set | Flip | Scale | Rollout | Undo


def decode_up_command(line: bytes) -> UpCommand:
    """One line of JSON. Raises ConfigError, naming what is wrong and what is allowed."""
    try:
        command: UpCommand = msgspec.json.decode(line, type=UpCommand)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        allowed = "one of describe, switch, set, flip, scale, rollout"
        raise ConfigError(f"command: {error}; expected {allowed}") from None
    return command


class Description(msgspec.Struct, frozen=True):
    """The part of a worker's description that commands need."""

    role: Role
    strategy: str
    model: str
    #: Frontends know the worker and may send it requests.
    registered: bool = False
    #: Number of running requests from frontends.
    client_requests: int = 0
    #: Number of requests without a first token.
    queued_requests: int = 0
    #: Share of its KV blocks in use; None: the engine does not report it.
    kv_occupancy: float | None = None
    #: Start flags that prevent a switch.
    fixed_by: tuple[str, ...] = ()
    #: Its hexadecimal instance id in the previous role; empty if it was never flipped.
    flipped_from: str = ""
    #: Its process name under `up`.
    process: str = ""
    #: It has entered its role; until then it may give way to another worker, or fail.
    ready: bool = True
    revision: str | None = None
    #: Its state (`worker/life.py`); empty from an older version.
    state: str = ""
    #: The role that it is flipping to, or empty.
    becomes: str = ""
    #: The id of its key; None from an older version.
    key: str | None = None
