"""Reads a WorkerConfig from the command line and the environment.

Precedence: flag, TRTLLM_DISAGG_<FLAG>, Dynamo's variable for the flag, WorkerConfig's default. An empty variable counts
as unset. Engine arguments are flags, too, as in `python -m dynamo.trtllm`: `--trtllm.a.b VALUE`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from trtllm_disagg import __version__
from trtllm_disagg.common.cli import refuse_unknown_arguments
from trtllm_disagg.config.deciders import DECIDERS
from trtllm_disagg.config.dynamo_flags import (
    ROUTER_FLAGS,
    Take,
    add_dynamo_arguments,
    check_runtime_variables,
    is_no,
    names_of_switch,
    refuse_ignored_variables,
    wants_forward_pass_metrics,
)
from trtllm_disagg.config.settings import NO, YES, Setting, namespace_of, parse_endpoint_id
from trtllm_disagg.config.worker_config import (
    DECIDER_THRESHOLDS,
    SETTINGS,
    Role,
    WorkerConfig,
    check_value,
    choices_of,
    flag_of,
)
from trtllm_disagg.config.yaml_file import shipped
from trtllm_disagg.errors import ConfigError

#: The settings that locate a deployment.
WHEREABOUTS = ("namespace", "discovery_backend", "request_plane", "event_plane")
_PREFIX = "--trtllm."
#: An internal flag with all of them as JSON.
_DOTTED = "--trtllm"
_OVERRIDE = "--override-engine-args"
#: A setting of version 0.2.
_POLICY_FILE, _POLICY_FILE_VARIABLE = "--policy-file", "TRTLLM_DISAGG_POLICY_FILE"
# Older and newer Dynamo's names for one worker that runs both phases.
_ROLE_ALIASES = {"prefill_and_decode": Role.AGG.value, "pd": Role.AGG.value}
_TYPES = {
    name: value_type
    for owner in (WorkerConfig, *DECIDERS.values())
    for name, value_type in get_type_hints(owner).items()
}


def with_dotted_flags(arguments: Sequence[str]) -> list[str]:
    """Combine all --trtllm.* flags into one with a JSON value. Raises ConfigError."""
    kept: list[str] = []
    nested: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith(_PREFIX):
            kept.append(argument)
            continue
        flag, has_value, value = argument.partition("=")
        if not has_value:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"{flag} needs a value")
            value = remaining.pop(0)
        _set(nested, flag, _typed(value))
    if not nested:
        return kept
    if any(argument.split("=", 1)[0] == _OVERRIDE for argument in kept):
        raise ConfigError(f"{_PREFIX}... and {_OVERRIDE} exclude each other; give one of them")
    return [*kept, f"{_DOTTED}={json.dumps(nested)}"]


def _set(nested: dict[str, Any], flag: str, value: Any) -> None:
    *path, name = flag.removeprefix(_PREFIX).split(".")
    if not all((*path, name)):
        raise ConfigError(f"{flag} has an empty part; expected {_PREFIX}key or {_PREFIX}group.key")
    owner = nested
    for part in path:
        owner = owner.setdefault(part, {})
        if not isinstance(owner, dict):
            raise ConfigError(f"{flag}: {part} has a value already, so it can have no keys")
    owner[name] = value


def _typed(text: str) -> Any:
    """None, a number, a boolean, or the text, as Dynamo reads it."""
    words = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for value_type in (int, float):
        with suppress(ValueError):
            return value_type(text)
    return text


def _set_both_publishers(namespace: argparse.Namespace, option: str, values: Sequence[str]) -> None:
    for name in ("publish_kv_events", "publish_metrics"):
        setattr(namespace, name, not is_no(option))


def _refuse_policy_file(namespace: argparse.Namespace, key: str, values: Sequence[str]) -> None:
    raise ConfigError(f"{key} is gone since 0.3: `trtllm-disagg set` changes thresholds while workers serve")


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of a worker. Flags not given leave no attribute in the namespace."""
    for title, settings in groupby(SETTINGS.values(), key=lambda setting: setting.group):
        group = parser.add_argument_group(title)
        for setting in settings:
            add_flag(group, setting)
        if title == "publishing":
            group.add_argument(
                *names_of_switch("--publish-events-and-metrics"),
                action=Take,
                take=_set_both_publishers,
                nargs=0,
                dest=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
                help="KV events and metrics (Dynamo's old name)",
            )
    parser.add_argument(_DOTTED, dest=_DOTTED, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=__version__)
    unsaid = argparse.SUPPRESS
    take = _refuse_policy_file
    parser.add_argument(
        _POLICY_FILE, action=Take, take=take, nargs="?", dest=unsaid, default=unsaid, help=unsaid
    )
    add_dynamo_arguments(parser)


def parse_worker_flags(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    ignores_unknown: bool = False,
    is_elsewhere: bool = False,
) -> WorkerConfig:
    """`read_worker_flags`, then `config_from_namespace`."""
    namespace = read_worker_flags(words, ignores_unknown=ignores_unknown)
    return config_from_namespace(namespace, environ, is_elsewhere=is_elsewhere)


def read_worker_flags(words: Sequence[str], *, ignores_unknown: bool = False) -> argparse.Namespace:
    """The flags in `words`, each checked alone. Raises ConfigError, also for unknown ones unless `ignores_unknown`."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    add_worker_arguments(parser)
    try:
        namespace, unknown = parser.parse_known_args(with_dotted_flags(words))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if not ignores_unknown:
        refuse_unknown_arguments(parser, unknown)
    return namespace


def config_from_namespace(
    namespace: argparse.Namespace, environ: Mapping[str, str], *, is_elsewhere: bool = False
) -> WorkerConfig:
    """Add the environment's values to the command line's; ignores other attributes. `is_elsewhere`: the worker starts
    on another machine or in a container, so its chat template need not exist here.
    """
    given = {name: getattr(namespace, name) for name in SETTINGS if hasattr(namespace, name)}
    environ = with_variables_of_model(environ, given.get("extra_engine_args"))
    refuse_ignored_variables(environ)
    if environ.get(_POLICY_FILE_VARIABLE):
        _refuse_policy_file(namespace, _POLICY_FILE_VARIABLE, ())
    check_runtime_variables(environ)
    values = _from_environment(environ) | given
    if hasattr(namespace, _DOTTED):
        values["override_engine_args"] = getattr(namespace, _DOTTED)
    if "model" not in values:
        raise ConfigError(f"--model is missing; give it, or set {SETTINGS['model'].variables[0]}")
    _resolve_endpoints(values)
    _resolve_namespace(values, by_flag="namespace" in given)
    _resolve_discovery(values, environ)
    if wants_forward_pass_metrics(namespace, environ):
        values.setdefault("publish_forward_pass_metrics", True)
    if not is_elsewhere:
        _resolve_template(values)
    explicit = frozenset(values)
    thresholds = {name: values.pop(name) for name in DECIDER_THRESHOLDS if name in values}
    router_flags = getattr(namespace, ROUTER_FLAGS, ())
    return WorkerConfig(
        **values,
        thresholds=thresholds,
        explicit=explicit,
        override_flag=_PREFIX if hasattr(namespace, _DOTTED) else _OVERRIDE,
        router_flags=router_flags,
    )


def with_variables_of_model(environ: Mapping[str, str], file: str | None) -> dict[str, str]:
    """`environ` and the further variables of `worker.env` beside the engine arguments. `file`: the flag's value."""
    file = file or _from_environment(environ, ("extra_engine_args",)).get("extra_engine_args", "/none")
    beside = shipped(Path(file)).with_name("worker.env")
    lines = beside.read_text().splitlines() if beside.is_file() else ()
    named = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
    return {**named, **{name: value for name, value in environ.items() if value or name not in named}}


def whereabouts_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The values of WHEREABOUTS for a worker that starts here without flags for them. Raises ConfigError."""
    values = _from_environment(environ, (*WHEREABOUTS, "endpoint", "worker_revision"))
    _resolve_namespace(values, by_flag=False)
    _resolve_discovery(values, environ)
    return {name: str(values.get(name, SETTINGS[name].default)) for name in WHEREABOUTS}


def add_flag(group: argparse._ActionsContainer, setting: Setting) -> None:
    options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": _help(setting)}
    if _value_type(setting.name) is bool:
        group.add_argument(*setting.names, action=argparse.BooleanOptionalAction, **options)
        return
    if setting.bare is not None:
        options |= {"nargs": "?", "const": setting.bare}
    choices = choices_of(setting.name)
    metavar = "{" + ",".join(choices) + "}" if choices else None
    group.add_argument(*setting.names, type=argument_parser_of(setting.name), metavar=metavar, **options)


def _help(setting: Setting) -> str:
    default = setting.default
    shown = f" (default: {default})" if isinstance(default, (str, int, float)) and default != "" else ""
    # argparse expands % in help texts.
    return f"{setting.help}{shown} [{', '.join(setting.variables)}]".replace("%", "%%")


def _value_type(name: str) -> type:
    options = [option for option in get_args(_TYPES[name]) if option is not NoneType]
    chosen: type = options[0] if options else _TYPES[name]
    return chosen


def argument_parser_of(name: str, key: str | None = None) -> Callable[[str], Any]:
    """An argparse type that reads one flag's value. Raises ConfigError, naming `key` or the flag."""
    return lambda text: _parse(name, text, key=key or flag_of(name))


def _parse(name: str, text: str, key: str) -> Any:
    value = _read(_value_type(name), text, key)
    check_value(name, value, key)
    return value


def _read(value_type: type, text: str, key: str) -> Any:
    if value_type is bool:
        if (word := text.strip().lower()) in (*YES, *NO):
            return word in YES
        raise ConfigError.bad_value(key, text, "true or false (also 1/0, on/off, yes/no)")
    if value_type in (int, float):
        try:
            return value_type(text)
        except ValueError:
            allowed = "an integer" if value_type is int else "a number"
            raise ConfigError.bad_value(key, text, allowed) from None
    return _ROLE_ALIASES.get(text, text) if value_type is Role else text


def _from_environment(environ: Mapping[str, str], names: Iterable[str] = SETTINGS) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in names:
        variable = next((variable for variable in SETTINGS[name].variables if environ.get(variable)), None)
        if variable is not None:
            values[name] = _parse(name, environ[variable], key=variable)
    return values


def _resolve_endpoints(values: dict[str, Any]) -> None:
    """Normalize endpoints, which are compared."""
    for name in ("endpoint", "next_endpoint"):
        if name in values:
            values[name] = parse_endpoint_id(values[name]).url


def _resolve_namespace(values: dict[str, Any], *, by_flag: bool) -> None:
    """As in Dynamo: an endpoint includes its namespace; otherwise a suffix distinguishes revisions."""
    if "endpoint" in values:
        # If --namespace is also given, WorkerConfig checks that the two agree.
        if not by_flag:
            values["namespace"] = parse_endpoint_id(values["endpoint"]).namespace
    elif revision := values.get("worker_revision"):
        values["namespace"] = namespace_of(values.get("namespace", SETTINGS["namespace"].default), revision)


def _resolve_discovery(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """As in Dynamo, an etcd's address is enough."""
    if "discovery_backend" not in values and environ.get("ETCD_ENDPOINTS"):
        values["discovery_backend"] = "etcd"


def _resolve_template(values: dict[str, Any]) -> None:
    name = "custom_jinja_template"
    if name not in values:
        return
    path = Path(os.path.expanduser(os.path.expandvars(values[name])))
    if not os.path.isfile(path):
        raise ConfigError.bad_value(flag_of(name), values[name], "a file that exists")
    values[name] = str(path)
