"""For launch/: what a worker with several ranks needs, told by the arguments that it will be started with.

`python -m trtllm_disagg.deployment.ranks ARG...` prints four words: the number of ranks, whether each has a GPU (yes or
no), what `srun --mpi` has to be, and the program that runs in every rank, if there is one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.deployment.gpus import num_ranks, read_worker
from trtllm_disagg.engine.engines import ENGINES
from trtllm_disagg.errors import ERROR_PREFIX, ConfigError


def describe(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Raises ConfigError or ArgumentError for what the worker would refuse."""
    config = read_worker(arguments, environ)
    engine = ENGINES[config.engine]
    on_gpus = "yes" if engine.is_tensorrt_llm else "no"
    return (
        f"{num_ranks(build_engine_args(config))} {on_gpus} {engine.srun_mpi} {engine.rank_launcher}".rstrip()
    )


if __name__ == "__main__":
    try:
        print(describe(sys.argv[1:], os.environ))
    except (ConfigError, argparse.ArgumentError) as error:
        sys.exit(f"{ERROR_PREFIX}{error}")
