"""A worker's configuration from its command line, read as `trtllm-disagg worker` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtllm_disagg.common.cli import COMMANDS, parser_of, refuse_unknown_arguments
from trtllm_disagg.config.args import add_worker_arguments, config_from_namespace, with_dotted_flags
from trtllm_disagg.config.worker_config import WorkerConfig


def parse_worker_args(argv: Sequence[str], environ: Mapping[str, str]) -> WorkerConfig:
    """Raises ConfigError for unknown or refused arguments."""
    parser = parser_of("worker", COMMANDS["worker"])
    add_worker_arguments(parser)
    namespace, unknown = parser.parse_known_args(with_dotted_flags(argv))
    refuse_unknown_arguments(parser, unknown)
    return config_from_namespace(namespace, environ)
