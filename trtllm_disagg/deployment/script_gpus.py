"""For scripts, which give each worker its GPUs themselves: do the workers fit side by side?

`python -m trtllm_disagg.deployment.script_gpus ARG... [-- ARG...]`, with the arguments of each worker, ends with 1 and
says why when they do not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby

from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.deployment.gpus import ROLE_VARIABLES, VARIABLE, gpus_of, read_worker
from trtllm_disagg.errors import ERROR_PREFIX, ConfigError


def require_room(workers: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> None:
    """For workers that are started one by one. Each takes the first GPUs of its role's variable, or of
    CUDA_VISIBLE_DEVICES. Raises ConfigError where they are too few, or two workers need more memory of one than it has.
    """
    gpus = gpus_of(workers, None, environ, present=tuple)
    shares: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for role, need in gpus.needs.items():
        devices, variable = gpus.devices[role], ROLE_VARIABLES[role]
        if len(devices) < need.num_gpus:
            name = variable if environ.get(variable) else VARIABLE
            raise ConfigError.bad_value(
                name, ",".join(devices), f"at least {need.num_gpus}: so many the {role} worker has"
            )
        for device in devices[: need.num_gpus]:
            shares[device][role] = need.fraction
    for device, of_roles in shares.items():
        if sum(of_roles.values()) > 1 + 1e-9:
            told = " and ".join(f"{fraction:g} for {role}" for role, fraction in of_roles.items())
            names = " and ".join(ROLE_VARIABLES[role] for role in of_roles)
            raise ConfigError.bad_value(
                names,
                device,
                "GPUs of their own, or kv_cache_config.free_gpu_memory_fraction that add up to at most 1 on one that "
                f"they share; they are {told}",
            )


def _roles(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Of workers whose arguments are right; what is wrong with the others they say themselves."""
    found: dict[str, list[str]] = {}
    for is_end, words in groupby(arguments, lambda word: word == "--"):
        with suppress(argparse.ArgumentError, ConfigError):
            if not is_end:
                config = read_worker(command := list(words), os.environ)
                build_engine_args(config)
                found[config.role.value] = command
    return found


if __name__ == "__main__":
    try:
        require_room(_roles(sys.argv[1:]), os.environ)
    except ConfigError as error:
        sys.exit(f"{ERROR_PREFIX}{error}")
