"""Reads a WorkerConfig from the command line and the environment.

A value comes from the flag, else from TRTLLM_DISAGG_<FLAG>, else from Dynamo's variable for the same flag, else it is
the default of WorkerConfig. An empty variable counts as not set. Engine arguments are flags, too, as in
`python -m dynamo.trtllm`: `--trtllm.a.b VALUE`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from trtllm_disagg import __version__
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
from trtllm_disagg.errors import ConfigError

#: The settings by which a deployment is found.
WHEREABOUTS = ("namespace", "discovery_backend", "request_plane", "event_plane")
_PREFIX = "--trtllm."
#: An internal flag that holds all of them as JSON.
_DOTTED = "--trtllm"
_OVERRIDE = "--override-engine-args"
#: When this variable is set, etcd is the default discovery, as in Dynamo.
_ETCD = "ETCD_ENDPOINTS"
# One flag of Dynamo that sets two settings.
_BOTH_PUBLISHERS_FLAG = "--publish-events-and-metrics"
_BOTH_PUBLISHERS = ("publish_kv_events", "publish_metrics")
# Other names of one worker that runs both phases, from older and newer Dynamo.
_ROLE_ALIASES = {"prefill_and_decode": Role.AGG.value, "pd": Role.AGG.value}
_TYPES = {
    name: kind for owner in (WorkerConfig, *DECIDERS.values()) for name, kind in get_type_hints(owner).items()
}


def with_dotted_flags(arguments: Sequence[str]) -> list[str]:
    """The arguments with all --trtllm.* flags combined into one with a JSON value. Raises ConfigError."""
    kept: list[str] = []
    nested: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith(_PREFIX):
            kept.append(argument)
            continue
        flag, has_value, value = argument.partition("=")
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{flag} needs a value")
            value = rest.pop(0)
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
    """None, a number, a boolean, or the text itself, as Dynamo reads it."""
    words = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _set_both_publishers(namespace: argparse.Namespace, option: str, values: Sequence[str]) -> None:
    for name in _BOTH_PUBLISHERS:
        setattr(namespace, name, not is_no(option))


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of a worker. A flag that is not given leaves no attribute in the namespace."""
    for title, settings in groupby(SETTINGS.values(), key=lambda setting: setting.group):
        group = parser.add_argument_group(title)
        for setting in settings:
            _add_flag(group, setting)
        if title == "publishing":
            group.add_argument(
                *names_of_switch(_BOTH_PUBLISHERS_FLAG),
                action=Take,
                take=_set_both_publishers,
                nargs=0,
                dest=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
                help="KV events and metrics (Dynamo's old name)",
            )
    parser.add_argument(_DOTTED, dest=_DOTTED, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=__version__)
    add_dynamo_arguments(parser)


def parse_worker_flags(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    ignores_unknown: bool = False,
    is_elsewhere: bool = False,
) -> WorkerConfig:
    """`read_worker_flags` of `words`, then `config_from_namespace`."""
    namespace = read_worker_flags(words, ignores_unknown=ignores_unknown)
    return config_from_namespace(namespace, environ, is_elsewhere=is_elsewhere)


def read_worker_flags(words: Sequence[str], *, ignores_unknown: bool = False) -> argparse.Namespace:
    """The flags in `words`, each checked by itself. Raises ConfigError, for unknown ones unless `ignores_unknown`."""
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
    """Add the environment's values to those of the command line; other attributes are ignored. `is_elsewhere`: the
    worker starts on another machine or in a container, so its chat template need not be here.
    """
    refuse_ignored_variables(environ)
    check_runtime_variables(environ)
    given = {name: getattr(namespace, name) for name in SETTINGS if hasattr(namespace, name)}
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


def whereabouts_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The values of WHEREABOUTS of a worker that starts here without a flag for them. Raises ConfigError."""
    values = _from_environment(environ, (*WHEREABOUTS, "endpoint", "worker_revision"))
    _resolve_namespace(values, by_flag=False)
    _resolve_discovery(values, environ)
    return {name: str(values.get(name, SETTINGS[name].default)) for name in WHEREABOUTS}


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The actions of a parser, one for each flag; argparse has no public name for them."""
    return parser._actions


def refuse_unknown_arguments(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Raise ConfigError for the first argument that the parser does not know, with the closest flag."""
    if not unknown:
        return
    name = unknown[0].split("=", 1)[0]
    replaced: Mapping[str, str] = getattr(parser, "replaced", {})
    if name in replaced:
        raise ConfigError(f"{name} is gone since 0.2: {replaced[name]}")
    known = [option for action in actions_of(parser) for option in action.option_strings]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else "; --help lists the flags"
    kind = "flag" if name.startswith("-") else "argument"
    raise ConfigError(f"unknown {kind} {name}{hint}")


def _add_flag(group: argparse._ArgumentGroup, setting: Setting) -> None:
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
    hint = _TYPES[name]
    options = [option for option in get_args(hint) if option is not NoneType]
    chosen: type = options[0] if options else hint
    return chosen


def argument_parser_of(name: str, key: str | None = None) -> Callable[[str], Any]:
    """A type for argparse that reads the value of one flag. Raises ConfigError, which names `key` or the flag."""
    return lambda text: _parse(name, text, key=key or flag_of(name))


def _parse(name: str, text: str, key: str) -> Any:
    value = _read(_value_type(name), text, key)
    check_value(name, value, key)
    return value


def _read(kind: type, text: str, key: str) -> Any:
    if kind is bool:
        if (word := text.strip().lower()) in (*YES, *NO):
            return word in YES
        raise ConfigError.bad_value(key, text, "true or false (also 1/0, on/off, yes/no)")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            allowed = "a whole number" if kind is int else "a number"
            raise ConfigError.bad_value(key, text, allowed) from None
    return _ROLE_ALIASES.get(text, text) if kind is Role else text


def _from_environment(environ: Mapping[str, str], names: Iterable[str] = SETTINGS) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in names:
        variable = next((variable for variable in SETTINGS[name].variables if environ.get(variable)), None)
        if variable is not None:
            values[name] = _parse(name, environ[variable], key=variable)
    return values


def _resolve_endpoints(values: dict[str, Any]) -> None:
    """One spelling, since endpoints are compared."""
    for name in ("endpoint", "next_endpoint"):
        if name in values:
            values[name] = parse_endpoint_id(values[name]).url


def _resolve_namespace(values: dict[str, Any], *, by_flag: bool) -> None:
    """As in Dynamo: an endpoint includes its namespace; otherwise a suffix distinguishes revisions."""
    if "endpoint" in values:
        # With --namespace as well, WorkerConfig checks that the two agree.
        if not by_flag:
            values["namespace"] = parse_endpoint_id(values["endpoint"]).namespace
    elif revision := values.get("worker_revision"):
        values["namespace"] = namespace_of(values.get("namespace", SETTINGS["namespace"].default), revision)


def _resolve_discovery(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    if "discovery_backend" not in values and environ.get(_ETCD):
        values["discovery_backend"] = "etcd"


def _resolve_template(values: dict[str, Any]) -> None:
    name = "custom_jinja_template"
    if name not in values:
        return
    path = Path(os.path.expanduser(os.path.expandvars(values[name])))
    if not os.path.isfile(path):
        raise ConfigError.bad_value(flag_of(name), values[name], "a file that exists")
    values[name] = str(path)
