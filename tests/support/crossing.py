"""Lists the plugin's functions that a request crosses."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

import trtllm_disagg

ROOT = Path(trtllm_disagg.__file__).parent
HANDLERS = (ROOT / "handlers").resolve()
ENGINES = str(ROOT / "engines")
#: Modules on a request's path, and functions in them that are not.
TELLING = ("answer", "attempts", "chain", "concurrent", "delivered", "local", "peers", "remote", "run")
ASIDE = (
    "replay_if_needed",
    "check",
    "facts",
    "instance_ids",
    "instance_id",
    "dispatch_span",
    "finished",
    "only_chunk",
    "goes_on",
)


class Crossing:
    """A profile of one request on both workers; a context manager."""

    def __init__(self) -> None:
        #: By first call.
        self._names: dict[str, int] = {}

    def __enter__(self) -> Crossing:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def picture(self) -> str:
        """A line per function on the path, indented by its callers."""
        return "\n".join("  " * depth + name for name, depth in self._names.items())

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (name := _name(frame)) is not None and name not in self._names:
            self._names[name] = sum(_name(each) is not None for each in _above(frame))


def _is_plugin(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith(ENGINES) and file.startswith((str(ROOT), str(HANDLERS)))


def _name(frame: FrameType) -> str | None:
    """`file.py Class.method` of a public function on the path."""
    code = frame.f_code
    function = code.co_qualname.rpartition(".")[2]
    if (
        not _is_plugin(frame)
        or Path(code.co_filename).stem not in TELLING
        or "<" in code.co_qualname
        or function in ASIDE
    ):
        return None
    if function.startswith("_") and function not in ("__call__", "__enter__", "__exit__"):
        return None
    return f"{Path(code.co_filename).name} {code.co_qualname}"


def _above(frame: FrameType) -> list[FrameType]:
    frames = []
    while (above := frame.f_back) is not None:
        frames.append(frame := above)
    return frames


async def crossed(work: Coroutine[Any, Any, Any]) -> Crossing:
    with Crossing() as crossing:
        await work
    return crossing
