"""Which requests are traced: OpenTelemetry's own variables, and Dynamo's, read as Dynamo's Rust runtime reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tracing.spans import TraceParent

SAMPLER, ARGUMENT, RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_TRACES_SAMPLE_RATIO"

#: Is a request of this trace id, with what its caller has decided, traced?
Sampler = Callable[[str, TraceParent | None], bool]

_PARENT_BASED = "parentbased_"
_KINDS = ("always_on", "always_off", "traceidratio")
_NAMES = (*_KINDS, *(_PARENT_BASED + kind for kind in _KINDS))


def sampler_of(environ: Mapping[str, str]) -> Sampler:
    """Raises ConfigError for a sampler that is none, or a ratio outside of 0 to 1. As everywhere, a caller that has
    decided is followed, unless a sampler is named that follows none.
    """
    name = environ.get(SAMPLER) or (f"{_PARENT_BASED}traceidratio" if environ.get(RATIO) else _NAMES[3])
    if name not in _NAMES:
        raise ConfigError.bad_value(SAMPLER, name, f"one of {', '.join(_NAMES)}")
    ratio = _ratio(environ, ARGUMENT if environ.get(SAMPLER) else RATIO)
    kind = name.removeprefix(_PARENT_BASED)
    limit = {"always_on": 1.0, "always_off": 0.0, "traceidratio": ratio}[kind] * (1 << 64)
    follows = name.startswith(_PARENT_BASED)

    def is_sampled(trace_id: str, parent: TraceParent | None) -> bool:
        if follows and parent is not None:
            return parent.is_sampled
        # As all SDKs compare it: workers and frontends then choose the same traces.
        return int(trace_id[16:], 16) < limit

    return is_sampled


def _ratio(environ: Mapping[str, str], variable: str) -> float:
    text = environ.get(variable) or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ConfigError.bad_value(variable, text, "a number from 0 to 1")
    return ratio
