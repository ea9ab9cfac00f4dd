"""Writes the pages of docs/reference/ that are made from the code: `python -m tools.reference`. A test compares."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trtllm_disagg import errors
from trtllm_disagg.config import thresholds
from trtllm_disagg.config.deciders import DECIDERS
from trtllm_disagg.config.worker_config import DECIDER_THRESHOLDS, SETTINGS
from trtllm_disagg.dynamo_runtime.error_mapping import to_dynamo
from trtllm_disagg.engines.embedded.params.llm_args import NO_EFFECT, LlmArgs, Served
from trtllm_disagg.engines.modelled.config import ModelledArgs
from trtllm_disagg.processes.exits import ExitCode

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
PIN = ROOT / "trtllm_disagg" / "engines" / "recording" / "llm_api" / "1.3.0rc.json"
MADE = "\n\n<!-- Made by tools/reference.py from the code; change that. -->\n\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    escaped = ([" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"


def code(value: object) -> str:
    return f"`{value}`"


def shown_default(value: object) -> str:
    if value is MISSING:
        return "required"
    value = value.value if isinstance(value, Enum) else value
    return (
        "" if value is None or value == "" else code(str(value).lower() if isinstance(value, bool) else value)
    )


def allowed(name: str) -> str:
    values = SETTINGS[name].allowed
    return values.in_words if values else ""


def flags_page() -> str:
    """The page of every setting of a worker."""
    text = "# Flags of a worker" + MADE
    text += (
        "A flag beats its variables, the first of them beats the second, and all beat the default. "
        "`trtllm-disagg up` hands flags to its\nworkers with `--worker-args '--flag value'`. "
        "Every other command says its own: `trtllm-disagg COMMAND --help`.\n"
    )
    for group, flags in groupby(SETTINGS.values(), key=lambda flag: flag.group):
        rows = (
            (
                " ".join(map(code, flag.names)),
                flag.help,
                allowed(flag.name),
                shown_default(SETTINGS[flag.name].default),
                " ".join(map(code, flag.variables)),
            )
            for flag in flags
        )
        text += f"\n## {group[0].upper()}{group[1:]}\n\n"
        text += table(("flag", "meaning", "allowed", "default", "variables"), rows)
    return text


def thresholds_page() -> str:
    """The page of what `set` and the policy file change."""
    users = {
        name: ", ".join(
            code(decider) for decider, kind in DECIDERS.items() if name in kind.__dataclass_fields__
        )
        for name in DECIDER_THRESHOLDS
    }
    users |= dict.fromkeys(thresholds.FALLBACK_BUDGET, "every worker that calls another one")
    users |= dict.fromkeys(thresholds.ADMISSION, "every worker")
    rows = (
        (
            code(name),
            code(SETTINGS[name].names[0]),
            users[name],
            SETTINGS[name].help,
            allowed(name),
            shown_default(SETTINGS[name].default) or "from the batch",
        )
        for name in thresholds.NAMES
    )
    text = "# Thresholds" + MADE
    text += (
        "`trtllm-disagg set` changes these in running workers, by flag, "
        "and `--policy-file` by name ([how](deciders.md)).\n\n"
    )
    return text + table(("name", "flag", "read by", "meaning", "allowed", "default"), rows)


def errors_page() -> str:
    """The page of the tree of errors: what crosses the wire and what a client sees."""
    documentation = inspect.getdoc(errors) or ""
    tree = "\n".join(
        line for line in documentation.splitlines() if re.search(r"^ *(DisaggError|[│├└])", line)
    )
    said = {
        found[1]: found[2]
        for line in tree.splitlines()
        if (found := re.search(r"(\w+Error) +(?:\d+ +)?(\S.*)", line))
    }
    rows = (
        (
            code(kind.__name__),
            code(kind.__bases__[0].__name__),
            code(kind.category),
            code(type(to_dynamo(kind("x"))).__name__),
            str(kind.status),
            kind.__doc__ or said.get(kind.__name__, "every error of this project"),
        )
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.DisaggError)
    )
    text = "# Errors" + MADE + "```\n" + inspect.cleandoc(tree) + "\n```\n\n"
    text += (
        "By its category an error becomes the exception of Dynamo that is *on the wire* to another worker or to the "
        "frontend, which turns it into the status. Several categories share `CannotConnect`: the worker that receives "
        "it takes it, like `EngineShutdown`, for a `PeerUnavailableError`.\nWhat is tried after each: "
        "[when the second stage fails](../explanation/orchestration.md#when-the-second-stage-fails).\n\n"
    )
    return text + table(("error", "is a", "category", "on the wire", "HTTP", "meaning"), rows)


def engine_arguments_page() -> str:
    """The page of what each engine does with TensorRT-LLM's arguments."""
    pinned = json.loads(PIN.read_text(encoding="utf-8"))
    known = {name for kind in pinned["classes"].values() for name in kind["fields"]}
    modelled = dict(arguments(ModelledArgs))
    rows = (
        (
            code(key),
            shown_default(default_of(field)),
            "yes" if key.rpartition(".")[2] in known else "",
            what_happens(field),
            "refused" if key.startswith("embedded") else what_happens(modelled[key]),
        )
        for key, field in arguments(LlmArgs)
    )
    text = "# Engine arguments" + MADE
    text += (
        "Keys of the `--extra-engine-args` file. TensorRT-LLM gets them as they are "
        f"(*pinned*: the pinned API of {pinned['version']} has the key).\n"
        "*served*: it does what it says, as long as what it belongs to is on; *no effect*: it tunes what is not "
        "there, and answers are the same without it;\nanything else is refused by name before anything is built. "
        "The key `modelled` is [the modelled engine's](../how-to/simulate-gpus.md).\n\n"
    )
    return text + table(("key", "default", "pinned", "embedded", "modelled"), rows)


def arguments(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        for inner in (field.annotation, *get_args(field.annotation)):
            if inspect.isclass(inner) and issubclass(inner, BaseModel) and not _whole(field):
                yield from arguments(inner, f"{prefix}{name}.")


def _whole(field: FieldInfo) -> bool:
    """Whether the same happens to the field and to all fields inside it."""
    return any(mark is NO_EFFECT or isinstance(mark, Served) for mark in field.metadata)


def default_of(field: FieldInfo) -> object:
    if field.is_required():
        return MISSING
    value = field.get_default(call_default_factory=True)
    return None if isinstance(value, BaseModel) else value


def what_happens(field: FieldInfo) -> str:
    for mark in field.metadata:
        if isinstance(mark, Served):
            return f"only {mark.expected}"
        if mark is NO_EFFECT:
            return "no effect"
    return "served"


def exit_codes_page() -> str:
    """The page of the exit codes."""
    rows = ((code(each.value), each.name.lower().replace("_", " "), each.meaning) for each in ExitCode)
    text = "# Exit codes" + MADE + "Of every command of `trtllm-disagg`.\n\n"
    return text + table(("code", "name", "meaning"), rows)


PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags_page,
    "thresholds.md": thresholds_page,
    "errors.md": errors_page,
    "engine-arguments.md": engine_arguments_page,
    "exit-codes.md": exit_codes_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
