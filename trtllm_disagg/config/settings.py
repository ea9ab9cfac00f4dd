"""Describes the setting behind a configuration field: allowed values, flag, help and other names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from trtllm_disagg.errors import ConfigError


class EndpointParts(NamedTuple):
    """The three names of a Dynamo endpoint."""

    namespace: str
    component: str
    endpoint: str

    @property
    def dotted(self) -> str:
        """The form for `DistributedRuntime.endpoint`."""
        return ".".join(self)

    @property
    def url(self) -> str:
        return f"dyn://{self.dotted}"


_NAME = r"[A-Za-z0-9_-]+"
#: As in Dynamo, the scheme is optional.
_ENDPOINT = re.compile(rf"(?:dyn://)?({_NAME})\.({_NAME})\.({_NAME})")
_ENDPOINT_TYPES = ("chat", "completions", "none")


def parse_endpoint_id(endpoint_id: str, key: str = "endpoint") -> EndpointParts:
    """Split `dyn://namespace.component.endpoint`; `key` names the setting in an error."""
    match = _ENDPOINT.fullmatch(endpoint_id)
    if match is None:
        raise ConfigError.bad_value(key, endpoint_id, "dyn://namespace.component.endpoint")
    return EndpointParts(*match.groups())


def namespace_of(namespace: str, revision: str | None) -> str:
    """The namespace of a revision's workers, as named by Dynamo's operator. Frontends keep namespaces apart."""
    return f"{namespace}-{revision}" if revision else namespace


#: Role -> component in Dynamo's Planner and dashboards.
COMPONENTS = {"prefill": "prefill", "decode": "backend", "agg": "backend"}
#: Where frontends find the first stage of strategies that workers run.
SHARED_COMPONENT = "tensorrt_llm"


def endpoint_of(namespace: str, role: str | None) -> str:
    """The usual endpoint of a role's workers; None: where frontends find a first stage of either role."""
    return EndpointParts(namespace, SHARED_COMPONENT if role is None else COMPONENTS[role], "generate").url


class Allowed(NamedTuple):
    """A field's allowed values, in words and as a function."""

    in_words: str
    accepts: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    #: Formats a wrong value for an error.
    shown: Callable[[Any], object] = lambda value: value


def one_of(*choices: str) -> Allowed:
    return Allowed("one of " + ", ".join(choices), lambda value: value in choices, choices)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _up_to(largest: int) -> Allowed:
    return Allowed(
        f"an integer from 1 to {largest}", lambda value: _is_whole(value) and 1 <= value <= largest
    )


def without_password(servers: str) -> str:
    """NATS servers without all before the last @, since a password may have any character, even an invalid one."""
    return re.sub(r"^(\w+://)?.*@", r"\1***@", servers, flags=re.DOTALL)


def _is_nats_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # `port` raises ValueError for an invalid port.
        return (
            parts.scheme in ("nats", "tls")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        return False


def names_of_endpoint_types(value: str) -> list[str]:
    """The names in a value of --endpoint-types; ignores case and spaces."""
    return [name.strip().lower() for name in value.split(",")]


def _are_endpoint_types(value: str) -> bool:
    names = names_of_endpoint_types(value)
    known = all(name in _ENDPOINT_TYPES for name in names)
    return known and (names == ["none"] or "none" not in names)


#: The limit of numbers in Dynamo's model card and engines.
POSITIVE = _up_to(2**31 - 1)
#: A request carries its failed instances, so tries are limited.
TRIES = _up_to(64)
POWER_OF_TWO = Allowed(
    "a power of two below 2^31", lambda value: POSITIVE.accepts(value) and value & (value - 1) == 0
)
FRACTION = Allowed("a number above 0, at most 1", lambda value: 0 < value <= 1)
NOT_EMPTY = Allowed("a name", lambda value: bool(value.strip()))
NAMESPACE = Allowed("letters, digits, - and _", lambda value: re.fullmatch(_NAME, value) is not None)
ENDPOINT_ID = Allowed("dyn://namespace.component.endpoint", lambda value: bool(_ENDPOINT.fullmatch(value)))
#: Dynamo's form for the owner of cache events; it also reads endpoints.
ENDPOINT_PATH = Allowed(
    "namespace/component/endpoint",
    lambda value: bool(re.fullmatch(rf"{_NAME}/{_NAME}/{_NAME}", value) or _ENDPOINT.fullmatch(value)),
)
API_TYPES = Allowed("chat, completions, both with a comma, or none", _are_endpoint_types)
NUMBER = Allowed("an integer from 0", lambda value: _is_whole(value) and value >= 0)
SHARE = Allowed(
    "a number from 0 to 1", lambda value: (isinstance(value, float) or _is_whole(value)) and 0 <= value <= 1
)
#: 31 years: for ever, but within the limits of timers, Slurm and Kubernetes.
MAX_SECONDS = 1e9
SECONDS = Allowed("a number of seconds above 0, at most 1e9", lambda value: 0 < value <= MAX_SECONDS)
SECONDS_OR_NONE = Allowed("a number of seconds from 0 to 1e9", lambda value: 0 <= value <= MAX_SECONDS)
NATS_URL = Allowed(
    "nats://host:port", lambda value: all(map(_is_nats_url, value.split(","))), shown=without_password
)

REQUIRED: Any = object()

#: A switch's values, in lower case.
YES, NO = ("1", "true", "on", "yes"), ("0", "false", "off", "no")

ENV_PREFIX = "TRTLLM_DISAGG_"
#: Prefix of Dynamo's variable: for its TensorRT-LLM worker, its runtime, or none.
DYNAMO_WORKER, DYNAMO_RUNTIME, NOT_IN_DYNAMO = "DYN_TRTLLM_", "DYN_", ""


class Setting(NamedTuple):
    """A setting: allowed values, flag, and names in Dynamo."""

    help: str
    #: None: any value of its type.
    allowed: Allowed | None
    #: Its group in `--help`; empty: the previous setting's (`option`).
    group: str
    #: Empty: named after the field (`option`).
    flag: str
    dynamo: str
    aliases: tuple[str, ...]
    more_variables: tuple[str, ...]
    #: The bare flag's value; None if it needs one.
    bare: str | None
    #: Of its field, as the next one.
    name: str = ""
    #: dataclasses.MISSING: required.
    default: Any = None

    def of_field(self, name: str, default: Any, group: str) -> Setting:
        flag = self.flag or "--" + name.replace("_", "-")
        return self._replace(name=name, default=default, flag=flag, group=self.group or group)

    @property
    def names(self) -> tuple[str, ...]:
        """Its flags."""
        return (self.flag, *self.aliases)

    @property
    def variables(self) -> tuple[str, ...]:
        """The setting's environment variables, strongest first."""
        name = self.flag.removeprefix("--").replace("-", "_").upper()
        dynamo = (self.dynamo + name.removeprefix("DYN_"),) if self.dynamo else ()
        return (ENV_PREFIX + name, *dynamo, *self.more_variables)


def option(
    default: Any,
    help: str,
    allowed: Allowed | None = None,
    *,
    group: str = "",
    flag: str = "",
    dynamo: str = NOT_IN_DYNAMO,
    aliases: tuple[str, ...] = (),
    variables: tuple[str, ...] = (),
    bare: str | None = None,
) -> Any:
    """A dataclass field with its `Setting`."""
    metadata = {"setting": Setting(help, allowed, group, flag, dynamo, aliases, variables, bare)}
    return field(metadata=metadata) if default is REQUIRED else field(default=default, metadata=metadata)
