"""Writes generated pages of docs/reference/: `python -m scripts.reference`. A test compares them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trtllm_disagg import errors
from trtllm_disagg.common.cli import COMMANDS
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.config import thresholds
from trtllm_disagg.config.deciders import DECIDERS, DeciderRule
from trtllm_disagg.config.settings import NOT_EMPTY
from trtllm_disagg.config.worker_config import DECIDER_THRESHOLDS, SETTINGS
from trtllm_disagg.dynamo_runtime.error_mapping import to_dynamo
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engines.embedded.params.llm_args import NO_EFFECT, LlmArgs, Served
from trtllm_disagg.engines.modelled.config import ModelledArgs
from trtllm_disagg.handlers.selection import Selector, StageClient
from trtllm_disagg.handlers.services import StrategyParts

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
MADE = "\n\n<!-- Made by scripts/reference.py from the code; change that. -->\n\n"


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
    in_words = values.in_words if values and values is not NOT_EMPTY else ""
    return re.sub(r"^(one of|an?)( number of)? |( to|, at most) (2147483647|1e9)$", "", in_words)


def flags_page() -> str:
    text = "# Flags of a worker" + MADE
    text += (
        "A flag overrides its variable `TRTLLM_DISAGG_<FLAG>` (`--max-tries`: `TRTLLM_DISAGG_MAX_TRIES`), which "
        "overrides Dynamo's variables,\nshown with the flag, which override the default. `trtllm-disagg up` passes "
        "flags to its workers by `--worker-args '--flag value'`.\nIntegers may be at most 2147483647, seconds at most "
        "1e9. Flags of other commands: `trtllm-disagg COMMAND --help`.\n"
    )
    for group, flags in groupby(SETTINGS.values(), key=lambda flag: flag.group):
        rows = (
            (
                " ".join(map(code, (*flag.names, *flag.variables[1:]))),
                flag.help,
                "; ".join(filter(None, (shown_default(flag.default), allowed(flag.name)))),
            )
            for flag in flags
        )
        text += f"\n## {group[0].upper()}{group[1:]}\n\n"
        text += table(("flag", "meaning", "default; allowed"), rows)
    return text


def cli_page() -> str:
    rows = ((code(name), command.help, code(command.example)) for name, command in COMMANDS.items())
    text = "# Commands" + MADE
    text += (
        "`trtllm-disagg COMMAND --help` lists a command's flags; those of `worker` have [a page](flags.md). "
        "All commands end with one of these [exit codes](exit-codes.md).\n\n"
    )
    return text + table(("command", "does", "example"), rows)


def thresholds_page() -> str:
    users = {
        name: ", ".join(
            code(decider) for decider, kind in DECIDERS.items() if name in kind.__dataclass_fields__
        )
        for name in DECIDER_THRESHOLDS
    }
    users |= dict.fromkeys(thresholds.FALLBACK_BUDGET, "workers that call others")
    users |= dict.fromkeys(thresholds.ADMISSION, "every worker")
    rows = (
        (code(name), users[name], shown_default(SETTINGS[name].default) or "from the batch")
        for name in thresholds.NAMES
    )
    text = "# Thresholds" + MADE
    text += (
        "`trtllm-disagg set` changes these in running workers, each by its [flag](flags.md) "
        "([how](deciders.md#changing-the-numbers-while-serving)).\n\n"
    )
    return text + table(("name", "read by", "default"), rows)


def errors_page() -> str:
    documentation = inspect.getdoc(errors) or ""
    tree = "\n".join(
        line for line in documentation.splitlines() if re.search(r"^ *(DisaggError|[│├└])", line)
    )
    rows = (
        (*map(code, (kind.__name__, kind.category, type(to_dynamo(kind("x"))).__name__)), str(kind.status))
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.DisaggError)
    )
    text = "# Errors" + MADE + "```\n" + inspect.cleandoc(tree) + "\n```\n\n"
    text += (
        "The category selects Dynamo's exception, which is *on the wire* to another worker or to the frontend; the "
        "frontend turns it into the HTTP status.\nA worker that receives `CannotConnect` or `EngineShutdown` treats it "
        "as a `PeerUnavailableError`. A `ConfigError` names the key, its value and what is allowed. What happens next: "
        "[when the second stage fails](../explanation/orchestration.md#when-the-second-stage-fails).\n\n"
    )
    return text + table(("error", "category", "on the wire", "HTTP"), rows)


SERVED = "served"
#: Headings by what both engines do with a key.
OF_BOTH = ("Served", "Accepted without effect: they tune what these engines lack", "Only without a value")


def engine_arguments_page() -> str:
    modelled = dict(arguments(ModelledArgs))
    of_both: dict[str, dict[str, list[str]]] = {SERVED: {}, "no effect": {}, "only no value": {}}
    different = []
    for key, field in arguments(LlmArgs):
        parent, _, name = key.rpartition(".")
        embedded = what_happens(field)
        other = "refused" if key.startswith("embedded") else what_happens(modelled[key])
        default = shown_default(default_of(field))
        if embedded == other in of_both:
            shown = f"{code(name)} ({default})" if default else code(name)
            of_both[embedded].setdefault(parent, []).append(shown)
        else:
            different.append((code(key), default, embedded, other))
    text = "# Engine arguments" + MADE
    text += (
        "What the embedded and the modelled engine do with the keys of the `--extra-engine-args` file; defaults are in "
        "brackets. They refuse any other key by name\nbefore they build anything. TensorRT-LLM gets all keys as they "
        "are; `embedded` and [`modelled`](../how-to/simulate-gpus.md) are ours.\n\n"
    )
    for by_parent, meaning in zip(of_both.values(), OF_BOTH, strict=True):
        lines = (
            f"- {code(parent) + ': ' if parent else ''}{', '.join(by_parent[parent])}\n"
            for parent in by_parent
        )
        text += f"## {meaning}\n\n{''.join(lines)}\n"
    return text + "## Others\n\n" + table(("key", "default", "embedded", "modelled"), different)


def arguments(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        for inner in (field.annotation, *get_args(field.annotation)):
            if inspect.isclass(inner) and issubclass(inner, BaseModel) and not _whole(field):
                yield from arguments(inner, f"{prefix}{name}.")


def _whole(field: FieldInfo) -> bool:
    """Whether a field and all fields inside it are treated alike."""
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
    return SERVED


def exit_codes_page() -> str:
    rows = ((code(each.value), each.name.lower().replace("_", " "), each.meaning) for each in ExitCode)
    text = "# Exit codes" + MADE + "Every command of `trtllm-disagg` ends with one of these.\n\n"
    return text + table(("code", "name", "meaning"), rows)


#: Classes for authors of plugins -> members to list; empty: all.
API: dict[type, tuple[str, ...]] = {
    StrategyParts: (),
    Engine: ("start_agg", "start_prefill", "start_decode"),
    DeciderRule: (),
    Selector: (),
    StageClient: (),
}


def api_page() -> str:
    text = "# API for plugin authors" + MADE + "How to use it: [extend](../how-to/extend.md).\n"
    for kind, names in API.items():
        fields = signature(kind) if kind is StrategyParts else ""
        text += f"\n## {kind.__name__}\n\n`{kind.__module__}.{kind.__name__}{fields}`. {first_paragraph(kind)}\n\n"
        for name, each in public_members(kind).items():
            if name in (names or (name,)):
                called = "" if isinstance(each, property) else signature(each)
                text += f"- {code(name + called)}: {first_paragraph(each)}\n"
    return text


def public_members(kind: type) -> dict[str, Any]:
    """Methods and properties, base classes first."""
    return {
        name: each
        for base in reversed(kind.__mro__)
        for name, each in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(each) or isinstance(each, property))
    }


def signature(called: Callable[..., Any]) -> str:
    return re.sub("'|self, |self", "", str(inspect.signature(called))).removesuffix(" -> None")


def first_paragraph(documented: Any) -> str:
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "flags.md": flags_page,
    "thresholds.md": thresholds_page,
    "errors.md": errors_page,
    "engine-arguments.md": engine_arguments_page,
    "exit-codes.md": exit_codes_page,
    "api.md": api_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
