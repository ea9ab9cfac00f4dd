"""Which schedule style a protocol is made for."""

from __future__ import annotations

from trtllm_disagg.errors import ConfigError

#: `dynamo` has words for both; of these, each is one style by what it says.
_ONLY_STYLE = {"two_phase": "context_first", "bootstrap": "generation_first"}


def require_style(protocol: str, style: str) -> None:
    """Raise ConfigError naming both flags."""
    only = _ONLY_STYLE.get(protocol, style)
    if only != style:
        raise ConfigError.bad_value(
            "--handoff-protocol",
            protocol,
            f"dynamo with --schedule-style {style}; {protocol} needs --schedule-style {only}",
        )
