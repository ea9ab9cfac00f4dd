"""Handles the flags of `python -m dynamo.trtllm` 1.6.1 that are no settings of this worker.

With SETTINGS they are all of Dynamo's flags; a test compares them with the installed ai-dynamo, so that an upgrade
shows new ones. Flags and variables that this worker would ignore are refused by name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trtllm_disagg.config.settings import DYNAMO_RUNTIME, DYNAMO_WORKER, NO, YES, Allowed, one_of
from trtllm_disagg.errors import ConfigError


class NotServed(NamedTuple):
    """A flag or variable of Dynamo's worker for a function that this worker lacks."""

    name: str
    variable: str
    #: Lower-case values that leave the function off.
    accepted: tuple[str, ...]
    #: A switch: `--x` and `--no-x`.
    is_switch: bool = False

    @classmethod
    def of(cls, accepted: str, prefix: str) -> NotServed:
        """`accepted`: the accepted form, --flag=VALUE,VALUE or a switch; `prefix`: of the variable."""
        flag, takes_values, values = accepted.partition("=")
        name = flag.replace("--no-", "--")
        variable = prefix + name.removeprefix("--").removeprefix("dyn-").replace("-", "_").upper()
        if takes_values:
            return cls(name, variable, ("", *values.split(",")))
        return cls(name, variable, ("", *(NO if is_no(flag) else YES)), is_switch=True)

    def check(self, key: str, value: str) -> None:
        """Raises ConfigError, naming `key`, unless the value leaves the function off."""
        if value.strip().lower() not in self.accepted:
            allowed = " or ".join(filter(None, self.accepted)) or "no value"
            raise ConfigError.bad_value(key, value, f"{allowed} ({_REASONS})")


_REASONS = "docs/reference/from-dynamo-trtllm.md says why, and what to use"


def is_no(option: str) -> bool:
    """Whether the flag is a switch's `--no-x`."""
    return option.startswith("--no-")


_OF_DYNAMOS_WORKER = """
    --model-loader-extra-config= --encode-endpoint= --allowed-local-media-path= --no-frontend-decoding
    --quant-algo= --quant-dynamic --no-enable-teacache --teacache-use-ret-steps --teacache-thresh=0.2
    --torch-dtype=bfloat16 --no-disable-torch-compile --no-enable-fullgraph --no-enable-cuda-graph
    --attn-backend=vanilla --dit-ulysses-size=1 --dit-ring-size=1 --dit-cfg-size=1
    --no-enable-layerwise-nvtx-marker --no-skip-warmup --default-height=480 --default-width=832
    --default-num-inference-steps=50 --default-guidance-scale=5.0 --default-num-frames=81
    --default-num-images-per-prompt=1
"""
_OF_DYNAMOS_RUNTIME = """
    --connector=none,null
    --no-dyn-enable-structural-tag --dyn-structural-tag-scope= --dyn-structural-tag-schema=
    --multimodal-embedding-cache-capacity-gb=0,0.0 --no-multimodal-embedding-cache-publisher
    --output-modalities=text --media-output-fs-url=file:///tmp/dynamo_media --media-output-http-url=
"""
NOT_SERVED = (
    *(NotServed.of(accepted, DYNAMO_WORKER) for accepted in _OF_DYNAMOS_WORKER.split()),
    *(NotServed.of(accepted, DYNAMO_RUNTIME) for accepted in _OF_DYNAMOS_RUNTIME.split()),
)

#: Variables of Dynamo without a flag.
VARIABLES_NOT_SERVED = (
    NotServed("DYN_SNAPSHOT_CONTROL_DIR", "DYN_SNAPSHOT_CONTROL_DIR", ("",)),
    NotServed("SNAPSHOT_RESTORE_STANDBY", "SNAPSHOT_RESTORE_STANDBY", ("", "0")),
    NotServed("DYN_ENABLE_TEST_LOGITS_PROCESSOR", "DYN_ENABLE_TEST_LOGITS_PROCESSOR", ("", "0")),
    NotServed("DYN_TRTLLM_KV_EVENT_HOSTS", "DYN_TRTLLM_KV_EVENT_HOSTS", ("",)),
)

#: If set, the Planner's metrics are published; upstream's worker does not use the port either.
FPM_PORT, FPM_TRACE = "DYN_FORWARDPASS_METRIC_PORT", "DYN_FPM_TRACE"
#: Flags that only set a variable of Dynamo's runtime; True for switches.
OF_THE_RUNTIME: Mapping[str, tuple[str, bool]] = {
    "--response-plane": ("DYN_RESPONSE_PLANE", False),
    "--engine-request-limit": ("DYN_ENGINE_REQUEST_LIMIT", False),
    "--fpm-trace": (FPM_TRACE, True),
    "--tcp-tls-cert-path": ("DYN_TCP_TLS_CERT_PATH", False),
    "--tcp-tls-key-path": ("DYN_TCP_TLS_KEY_PATH", False),
    "--tcp-tls-ca-cert-path": ("DYN_TCP_TLS_CA_CERT_PATH", False),
    "--tcp-tls-insecure": ("DYN_TCP_TLS_INSECURE", True),
    "--tcp-tls-server-name": ("DYN_TCP_TLS_SERVER_NAME", False),
    "--tcp-tls-handshake-timeout": ("DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS", False),
    "--tcp-tls-client-cert-path": ("DYN_TCP_TLS_CLIENT_CERT_PATH", False),
    "--tcp-tls-client-key-path": ("DYN_TCP_TLS_CLIENT_KEY_PATH", False),
    "--tcp-tls-client-ca-cert-path": ("DYN_TCP_TLS_CLIENT_CA_CERT_PATH", False),
    "--nats-tls-ca-cert-path": ("NATS_TLS_CA_CERT_PATH", False),
    "--nats-tls-insecure": ("NATS_TLS_INSECURE", True),
    "--nats-tls-client-cert-path": ("NATS_TLS_CLIENT_CERT_PATH", False),
    "--nats-tls-client-key-path": ("NATS_TLS_CLIENT_KEY_PATH", False),
}
_ABOVE_ZERO = Allowed("an integer above 0", lambda text: bool(re.fullmatch(r"0*[1-9][0-9]{0,9}", text)))
#: Checked as in Dynamo's worker, since the runtime ignores a wrong number.
OF_THE_RUNTIME_CHECKED: Mapping[str, Allowed] = {
    "--response-plane": one_of("tcp", "quic"),
    "--engine-request-limit": _ABOVE_ZERO,
    "--tcp-tls-handshake-timeout": _ABOVE_ZERO,
}


def _flags(names: str) -> tuple[str, ...]:
    return tuple(f"--{name}" for name in names.split())


#: Advertised in the model card for the frontend's router; Dynamo reads these flags and their variables.
OF_THE_ROUTER = _flags("""
    router-mode router-session-affinity-ttl-secs router-session-affinity-mode active-decode-blocks-threshold
    active-prefill-tokens-threshold active-prefill-tokens-threshold-frac router-kv-overlap-score-credit
    router-kv-overlap-score-credit-decay router-kv-overlap-score-weight kv-overlap-score-weight
    router-prefill-load-scale router-decode-active-request-weight router-host-cache-hit-weight
    router-disk-cache-hit-weight router-temperature router-tracking-hash router-tracking-key-file
    router-tracking-key-id router-prefill-load-model router-ttl-secs router-approximate-cache-policy
    router-queue-threshold router-policy-config router-conditional-disagg-config router-prefill-policy
    router-decode-policy router-event-threads router-queue-policy shared-cache-multiplier shared-cache-type
    router-predicted-ttl-secs
""")
ROUTER_SWITCHES = _flags("""
    load-aware router-kv-events kv-events router-replica-sync router-track-active-blocks track-active-blocks
    router-track-output-blocks track-output-blocks router-assume-kv-reuse assume-kv-reuse
    router-track-prefill-tokens router-conditional-disagg use-remote-indexer enable-session-prefix-index
""")

#: Namespace attributes with the values of the flags above.
ROUTER_FLAGS, RUNTIME_VARIABLES = "router_flags", "runtime_variables"


def add_dynamo_arguments(parser: argparse.ArgumentParser) -> None:
    """Add Dynamo's flags, hidden in --help: Dynamo's pages describe them."""
    unsaid = argparse.SUPPRESS

    def add(name: str, take: Taker, nargs: int | str | None) -> None:
        """`nargs` 0: a switch."""
        names = names_of_switch(name) if nargs == 0 else (name,)
        parser.add_argument(
            *names, action=Take, take=take, nargs=nargs, dest=unsaid, default=unsaid, help=unsaid
        )

    for flag in NOT_SERVED:
        add(flag.name, _refusing(flag), 0 if flag.is_switch else "*")
    for name, (variable, is_switch) in OF_THE_RUNTIME.items():
        add(name, _setting(name, variable), 0 if is_switch else None)
    for name in OF_THE_ROUTER:
        add(name, _pass_to_router, None)
    for name in ROUTER_SWITCHES:
        add(name, _pass_to_router, 0)


def refuse_ignored_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for the first variable of Dynamo that this worker would ignore."""
    for flag in (*NOT_SERVED, *VARIABLES_NOT_SERVED):
        for value in environ.get(flag.variable, "").split():
            flag.check(flag.variable, value)


def check_runtime_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for the first variable of a checked flag that Dynamo's worker would refuse."""
    for name in OF_THE_RUNTIME_CHECKED:
        if value := environ.get(variable := OF_THE_RUNTIME[name][0]):
            _check_for_the_runtime(name, value, variable)


def _check_for_the_runtime(name: str, value: str, key: str) -> None:
    if (allowed := OF_THE_RUNTIME_CHECKED.get(name)) and not allowed.accepts(value):
        raise ConfigError.bad_value(key, value, allowed.in_words)


def wants_forward_pass_metrics(namespace: argparse.Namespace, environ: Mapping[str, str]) -> bool:
    """Whether a flag or variable of Dynamo's asks for them."""
    traces = getattr(namespace, RUNTIME_VARIABLES, {}).get(FPM_TRACE, environ.get(FPM_TRACE, ""))
    return bool(environ.get(FPM_PORT)) or traces.strip().lower() in YES


def names_of_switch(name: str) -> tuple[str, str]:
    return name, f"--no-{name.removeprefix('--')}"


Taker = Callable[[argparse.Namespace, str, Sequence[str]], None]


class Take(argparse.Action):
    """An argparse action that calls `take` with namespace, given flag and values."""

    def __init__(self, option_strings: Sequence[str], dest: str, take: Taker, **more: Any) -> None:
        super().__init__(option_strings, dest, **more)
        self._take = take

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = [values] if isinstance(values, str) else [str(value) for value in values or ()]
        self._take(namespace, option_string or "", given)


def _refusing(flag: NotServed) -> Taker:
    def take(namespace: argparse.Namespace, option: str, values: Sequence[str]) -> None:
        for value in ["false" if is_no(option) else "true"] if flag.is_switch else values:
            flag.check(flag.name, value)

    return take


def _setting(name: str, variable: str) -> Taker:
    def take(namespace: argparse.Namespace, option: str, values: Sequence[str]) -> None:
        value = values[0] if values else "" if is_no(option) else "1"
        _check_for_the_runtime(name, value, name)
        known = getattr(namespace, RUNTIME_VARIABLES, {})
        setattr(namespace, RUNTIME_VARIABLES, {**known, variable: value})

    return take


def _pass_to_router(namespace: argparse.Namespace, option: str, values: Sequence[str]) -> None:
    setattr(namespace, ROUTER_FLAGS, (*getattr(namespace, ROUTER_FLAGS, ()), option, *values))
