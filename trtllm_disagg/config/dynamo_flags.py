"""The flags of `python -m dynamo.trtllm` 1.6.1 that are no settings of this worker, and how each is handled.

Together with SETTINGS these are all flags of Dynamo's: a test compares them with the installed ai-dynamo, so that an
upgrade shows what is new. A flag, or its variable, that this worker would ignore is refused by name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trtllm_disagg.config.settings import DYNAMO_RUNTIME, DYNAMO_WORKER, NO, YES, Allowed, one_of
from trtllm_disagg.errors import ConfigError


class NotServed(NamedTuple):
    """A flag of Dynamo's worker for a function that this worker does not have."""

    name: str
    variable: str
    #: Values, in lower case, that leave the function off.
    accepted: tuple[str, ...]
    #: What to use instead.
    instead: str
    #: The flag is a switch: `--x` and `--no-x`.
    is_switch: bool = False
    #: The flag takes any number of values.
    is_list: bool = False

    def check(self, key: str, value: str) -> None:
        """Raise ConfigError, which names `key`, unless the value leaves the function off."""
        if value.strip().lower() in self.accepted:
            return
        allowed = " or ".join(name for name in self.accepted if name) or "no value"
        raise ConfigError.bad_value(key, value, f"{allowed}: {self.instead}")


_TEXT = "this worker serves text only; run `python -m dynamo.trtllm` for images, video and audio"
_TAG = "use --dyn-structural-tag"


def _refused(
    name: str, off: str | bool, instead: str = _TEXT, dynamo: str = DYNAMO_WORKER, *, is_list: bool = False
) -> NotServed:
    """`off`: the values of the flag, or the state of the switch, that leave the function off. `dynamo`: the prefix of
    its variable.
    """
    variable = dynamo + name.removeprefix("--").removeprefix("dyn-").replace("-", "_").upper()
    if isinstance(off, bool):
        return NotServed(name, variable, YES if off else ("", *NO), instead, is_switch=True)
    return NotServed(name, variable, ("", *off.split()), instead, is_list=is_list)


NOT_SERVED = (
    # Of the engine.
    _refused("--model-loader-extra-config", "", "give it as a key of the --extra-engine-args file"),
    # Of the runtime.
    _refused(
        "--connector",
        "none null",
        "KVBM and LMCache are not built in; kv_connector_config in the engine YAML is passed on",
        DYNAMO_RUNTIME,
        is_list=True,
    ),
    _refused("--dyn-enable-structural-tag", False, _TAG, DYNAMO_RUNTIME),
    _refused("--dyn-structural-tag-scope", "", _TAG, DYNAMO_RUNTIME),
    _refused("--dyn-structural-tag-schema", "", _TAG, DYNAMO_RUNTIME),
    # Multimodal.
    _refused("--enable-multimodal", False),
    _refused("--modality", "text"),
    _refused("--encode-endpoint", ""),
    _refused("--allowed-local-media-path", ""),
    _refused("--max-file-size-mb", "50"),
    _refused("--frontend-decoding", False),
    _refused("--multimodal-embedding-cache-capacity-gb", "0 0.0", dynamo=DYNAMO_RUNTIME),
    _refused("--multimodal-embedding-cache-publisher", False, dynamo=DYNAMO_RUNTIME),
    _refused("--output-modalities", "text", dynamo=DYNAMO_RUNTIME, is_list=True),
    _refused("--media-output-fs-url", "file:///tmp/dynamo_media", dynamo=DYNAMO_RUNTIME),
    _refused("--media-output-http-url", "", dynamo=DYNAMO_RUNTIME),
    # Diffusion.
    _refused("--quant-algo", ""),
    _refused("--quant-dynamic", True),
    _refused("--enable-teacache", False),
    _refused("--teacache-use-ret-steps", True),
    _refused("--teacache-thresh", "0.2"),
    _refused("--torch-dtype", "bfloat16"),
    _refused("--disable-torch-compile", False),
    _refused("--enable-fullgraph", False),
    _refused("--enable-cuda-graph", False),
    _refused("--attn-backend", "vanilla"),
    _refused("--dit-ulysses-size", "1"),
    _refused("--dit-ring-size", "1"),
    _refused("--dit-cfg-size", "1"),
    _refused("--enable-layerwise-nvtx-marker", False),
    _refused("--skip-warmup", False),
    _refused("--default-height", "480"),
    _refused("--default-width", "832"),
    _refused("--default-num-inference-steps", "50"),
    _refused("--default-guidance-scale", "5.0"),
    _refused("--default-num-frames", "81"),
    _refused("--default-num-images-per-prompt", "1"),
)

_SNAPSHOT = "snapshots of a loaded worker are not taken; each one loads its model"
_TESTS = "it is for Dynamo's own tests"
_STREAMED = "KV events are polled (--publish-kv-events), not streamed"

#: Variables of Dynamo without a flag.
VARIABLES_NOT_SERVED = (
    NotServed("DYN_SNAPSHOT_CONTROL_DIR", "DYN_SNAPSHOT_CONTROL_DIR", ("",), _SNAPSHOT),
    NotServed("SNAPSHOT_RESTORE_STANDBY", "SNAPSHOT_RESTORE_STANDBY", ("", "0"), _SNAPSHOT),
    NotServed("DYN_ENABLE_TEST_LOGITS_PROCESSOR", "DYN_ENABLE_TEST_LOGITS_PROCESSOR", ("", "0"), _TESTS),
    NotServed("DYN_TRTLLM_KV_EVENT_HOSTS", "DYN_TRTLLM_KV_EVENT_HOSTS", ("",), _STREAMED),
)

#: Set, and the Planner's metrics are published; upstream's worker has no use for the port either.
FPM_PORT, FPM_TRACE = "DYN_FORWARDPASS_METRIC_PORT", "DYN_FPM_TRACE"
#: Flags that only set the variable that Dynamo's runtime reads; True for switches.
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
_ABOVE_ZERO = Allowed("a whole number above 0", lambda text: bool(re.fullmatch(r"0*[1-9][0-9]{0,9}", text)))
#: Flags of these whose values are checked as in Dynamo's worker: the runtime ignores a wrong number.
OF_THE_RUNTIME_CHECKED: Mapping[str, Allowed] = {
    "--response-plane": one_of("tcp", "quic"),
    "--engine-request-limit": _ABOVE_ZERO,
    "--tcp-tls-handshake-timeout": _ABOVE_ZERO,
}


def _flags(names: str) -> tuple[str, ...]:
    return tuple(f"--{name}" for name in names.split())


#: What a worker advertises in its model card for the frontend's router; Dynamo reads them, and their variables.
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

#: Attributes of the namespace that hold the values of the flags above.
ROUTER_FLAGS, RUNTIME_VARIABLES = "router_flags", "runtime_variables"


def add_dynamo_arguments(parser: argparse.ArgumentParser) -> None:
    """Add Dynamo's flags, hidden in --help: Dynamo's own pages describe them."""
    unsaid = argparse.SUPPRESS

    def add(name: str, take: Taker, nargs: int | str | None) -> None:
        """`nargs` 0: a switch."""
        names = names_of_switch(name) if nargs == 0 else (name,)
        parser.add_argument(
            *names, action=Take, take=take, nargs=nargs, dest=unsaid, default=unsaid, help=unsaid
        )

    for flag in NOT_SERVED:
        add(flag.name, _refusing(flag), 0 if flag.is_switch else "*" if flag.is_list else None)
    for name, (variable, is_switch) in OF_THE_RUNTIME.items():
        add(name, _setting(name, variable), 0 if is_switch else None)
    for name in OF_THE_ROUTER:
        add(name, _pass_to_router, None)
    for name in ROUTER_SWITCHES:
        add(name, _pass_to_router, 0)


def refuse_ignored_variables(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for the first variable of Dynamo that this worker would ignore."""
    for flag in (*NOT_SERVED, *VARIABLES_NOT_SERVED):
        if (value := environ.get(flag.variable)) is None:
            continue
        for part in value.split() if flag.is_list else [value]:
            flag.check(flag.variable, part)


def check_runtime_variables(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for the first variable of a checked flag with a value that Dynamo's worker refuses."""
    for name in OF_THE_RUNTIME_CHECKED:
        variable, _ = OF_THE_RUNTIME[name]
        if value := environ.get(variable):
            _check_for_the_runtime(name, value, variable)


def _check_for_the_runtime(name: str, value: str, key: str) -> None:
    allowed = OF_THE_RUNTIME_CHECKED.get(name)
    if allowed is not None and not allowed.accepts(value):
        raise ConfigError.bad_value(key, value, allowed.in_words)


def wants_forward_pass_metrics(namespace: argparse.Namespace, environ: Mapping[str, str]) -> bool:
    """Whether a flag or a variable of Dynamo's asks for them."""
    traces = getattr(namespace, RUNTIME_VARIABLES, {}).get(FPM_TRACE, environ.get(FPM_TRACE, ""))
    return bool(environ.get(FPM_PORT)) or traces.strip().lower() in YES


def names_of_switch(name: str) -> tuple[str, str]:
    return name, f"--no-{name.removeprefix('--')}"


Taker = Callable[[argparse.Namespace, str, Sequence[str]], None]


class Take(argparse.Action):
    """An argparse action that only calls `take` with the namespace, the flag as given, and its values."""

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


def is_no(option: str) -> bool:
    """Whether the flag is the `--no-x` form of a switch."""
    return option.startswith("--no-")


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
