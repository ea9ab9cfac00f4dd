"""A worker's flags, as its command line or a manifest has them: the settings that they make."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import dropwhile

from trtllm_disagg.config.args import (
    add_worker_arguments,
    config_from_namespace,
    refuse_unknown_arguments,
)
from trtllm_disagg.config.dotted_flags import with_dotted_flags
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engines import ENGINES
from trtllm_disagg.errors import ConfigError

ENGINE = ENGINES["tensorrt_llm"].name
#: Of a worker whose flags name none.
ANY_MODEL = "org/model"


def settings_of(
    role: Role, words: Sequence[str], *, strategy: str = "decode_first", schedule_style: str = "context_first"
) -> WorkerConfig:
    """`words`: flags, or a whole command line, of a worker on TensorRT-LLM; no variables. What it leaves open is as the
    other arguments say. Raises ConfigError, naming doctor's flag and the worker's.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    add_worker_arguments(parser)
    usual = ["--model", ANY_MODEL, "--disaggregation-mode", role.value, "--disaggregation-strategy", strategy]
    usual += ["--schedule-style", schedule_style]
    flags = list(dropwhile(lambda word: not word.startswith("--"), words))
    try:
        namespace, unknown = parser.parse_known_args([*usual, *with_dotted_flags(flags)])
        refuse_unknown_arguments(parser, unknown)
        config = config_from_namespace(namespace, {})
        if config.role is not role:
            raise ConfigError.bad_value("--disaggregation-mode", config.role.value, role.value)
        if config.engine not in ("auto", ENGINE):
            raise ConfigError.bad_value("--engine", config.engine, f"{ENGINE}, whose rules doctor knows")
    except (argparse.ArgumentError, ConfigError) as error:
        raise ConfigError(f"--{role.value}-flags: {error}") from error
    return replace(config, engine=ENGINE)
