"""`--dump-config-to FILE`: what came out of flags, variables and YAML, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtllm_disagg import __version__
from trtllm_disagg.config.worker_config import WorkerConfig, flag_of
from trtllm_disagg.errors import ConfigError


def dump_config(config: WorkerConfig, engine_args: Mapping[str, Any]) -> None:
    """Where it is asked for. Raises ConfigError when the file cannot be written."""
    if config.dump_config_to is None:
        return
    # The names are those of Dynamo's dump.
    content = {"version": __version__, "dynamo_args": asdict(config), "engine_args": engine_args}
    try:
        Path(config.dump_config_to).expanduser().write_text(
            json.dumps(content, indent=2, default=_plain) + "\n"
        )
    except OSError as error:
        allowed = f"a file that can be written ({error.strerror})"
        raise ConfigError.bad_value(flag_of("dump_config_to"), config.dump_config_to, allowed) from error


def _plain(value: object) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)
