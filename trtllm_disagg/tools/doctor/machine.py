"""Checks whether this machine can run TensorRT-LLM, and writes the report to paste, without secrets."""

from __future__ import annotations

import getpass
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

import yaml

from trtllm_disagg import __version__
from trtllm_disagg.common.machine import check_limits, needs_of_worker
from trtllm_disagg.engine.mpi_start import TWO_MPIS, has_two_mpis, try_start
from trtllm_disagg.engine.trtllm_version import installed_version
from trtllm_disagg.errors import ConfigError, harmless
from trtllm_disagg.tools.doctor.pair import Pair
from trtllm_disagg.tools.doctor.rules import Finding, Row
from trtllm_disagg.tools.up.gpus import VARIABLE, parse_gpus, present_gpus

_PACKAGES = (
    "tensorrt-llm ai-dynamo ai-dynamo-runtime torch transformers nixl nixl-cu12 nixl-cu13 mpi4py mpich"
)
_PROGRAMS = (
    ("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"),
    ("ucx_info", "-v"),
)
_VARIABLES = re.compile(r"(CUDA|NVIDIA|NCCL|UCX|NIXL|OMPI|PRTE|PMIX|TLLM|TRTLLM|DYN)_")
_SECRET_NAME = re.compile(r"(?i)(^|[_-])(token|key)$|secret|passw|passphrase|credential|auth(?!or)|apikey")
#: The part before @ in a URL, known kinds of tokens, and 32 characters that are neither a word nor a hash.
_SECRETS = re.compile(
    r"(?<=://)[^/\s@]*(?=@)|\b(?:hf_|nvapi-|sk-|gh[a-z]_|glpat-)[\w-]{8,}"
    r"|(?<![\w+/=-])(?=[\w+/=-]*[a-z])(?=[\w+/=-]*[A-Z])(?=[\w+/=-]*\d)[\w+=-]{32,}"
)
#: Common accounts, which name no person.
_NO_NAMES = {"", "root", "dynamo", "user"}
_HIDDEN = "***"


def findings(environ: Mapping[str, str]) -> list[Finding]:
    return [*_installed(), *_mpi(environ), *_gpus(environ), *_limits()]


def _installed() -> Iterator[Finding]:
    row, version = Row("TensorRT-LLM", "workers run it"), installed_version()
    yield row.fine(version) if version else row.unknown("it is not installed here")


def _mpi(environ: Mapping[str, str]) -> Iterator[Finding]:
    row = Row("MPI", "TensorRT-LLM starts all its ranks by MPI, even a single one")
    if has_two_mpis():
        yield row.error("two", TWO_MPIS)
        return
    start = try_start(environ)
    if not start.was_tried or (start.failure and not installed_version()):
        yield row.unknown(start.problem)
    elif start.problem:
        yield (row.error if start.failure else row.note)(str(start), start.problem)
    else:
        yield row.fine(str(start))


def _gpus(environ: Mapping[str, str]) -> Iterator[Finding]:
    row = Row("visible GPUs", "`up` divides them among the workers")
    there, exported = present_gpus(), environ.get(VARIABLE)
    try:
        seen = tuple(there) if exported is None else parse_gpus(VARIABLE, exported, there) if exported else ()
    except ConfigError as error:
        yield row.error(exported or "", str(error))
        return
    unknown = row.unknown("neither nvidia-smi nor the driver lists any")
    yield row.fine(",".join(seen)) if there and seen else unknown


def _limits() -> Iterator[Finding]:
    row = Row("limits", "a process that reaches a limit later cannot say which")
    try:
        short = check_limits(needs_of_worker(has_peers=True, discovery_backend="file"))
    except ConfigError as error:
        yield row.error("", str(error))
        return
    yield row.note("", "; ".join(short)) if short else row.fine("enough")


def report(found: list[Finding], environ: Mapping[str, str], pair: Pair | None = None) -> str:
    """The facts that a bug report needs; with `pair`, both engines' arguments."""
    installed = {each.name.replace("_", "-"): each.version for each in metadata.distributions()}
    versions = (f"{name} {installed[name]}" for name in _PACKAGES.split() if name in installed)
    shown = (name for name in sorted(filter(_VARIABLES.match, environ)) if not _is_secret(name))
    lines = [
        f"trtllm-disagg {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"packages: {', '.join(versions)}",
        *(f"{program}: {_said_by(program, *arguments)}" for program, *arguments in _PROGRAMS),
        *(f"{each.verdict}: {each.rule}: {[*each.values.values()]} {each.instead}" for each in found),
        *(f"{name}={harmless(environ[name])[:200]}" for name in shown),
    ]
    for stage in pair.stages if pair else ():
        given = yaml.safe_dump(_without_secrets(stage.given), sort_keys=False)
        lines.append(f"{stage.role} ({stage.source}):\n{given}")
    return hidden("\n".join(lines), environ)


def hidden(text: str, environ: Mapping[str, str]) -> str:
    """Hides values of variables with secret names, tokens, home directories, and names of people and of this host."""
    for name, value in environ.items():
        if _is_secret(name) and len(value) > 3:
            text = text.replace(value, _HIDDEN)
    text = _SECRETS.sub(_HIDDEN, text)
    for home in filter(None, (environ.get("HOME"), os.path.expanduser("~"))):
        text = text.replace(home, "~") if len(home) > 1 else text
    text = re.sub(r"/(home|Users)/[^/\s'\",:]+", "~", text)
    names = {environ.get("USER", ""), environ.get("LOGNAME", ""), platform.node()}
    with suppress(KeyError, OSError):  # containers may have no name for the user
        names.add(getpass.getuser())
    for name in names - _NO_NAMES:
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", _HIDDEN, text)
    return text


def _without_secrets(content: Any) -> Any:
    if isinstance(content, Mapping):
        open_ones = {
            key: _without_secrets(value) for key, value in content.items() if not _is_secret(str(key))
        }
        return dict.fromkeys(content, _HIDDEN) | open_ones
    return [_without_secrets(each) for each in content] if isinstance(content, list) else content


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _said_by(program: str, *arguments: str) -> str:
    try:
        done = subprocess.run((program, *arguments), capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "; ".join((done.stdout or done.stderr).split("\n")[:16]).strip("; ")
