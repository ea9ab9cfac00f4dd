"""Dynamo's own worker, `python -m dynamo.trtllm`, on the recording engine, for `bench overhead --upstream`.

It takes the flags of this project's worker and removes those that Dynamo's worker lacks.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from trtllm_disagg.errors import ConfigError

MODULE = "dynamo.trtllm"
#: Modules that it imports and TensorRT-LLM would bring: module -> distribution.
_BROUGHT = {"PIL": "pillow", "blake3": "blake3"}


def require_upstream() -> None:
    """Raises ConfigError when Dynamo's worker cannot start here."""
    missing = [package for module, package in _BROUGHT.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"--upstream: {MODULE} needs {' and '.join(missing)}; pip install 'trtllm-disagg[bench]'"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until it is told to stop."""
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("--disaggregation-strategy")
    ours.add_argument("--engine")
    _, theirs = ours.parse_known_args(arguments)
    mount_recording_engine()
    sys.argv = [MODULE, *theirs, "--gpus-per-node", "1"]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


def mount_recording_engine() -> None:
    """Mounts the embedded engine as tensorrt_llm, then replaces its names by those of the recording engine."""
    # Imported here: the benchmark itself imports this module and needs no engine.
    from trtllm_disagg.engines.embedded.mount import ROOT, mount_as_tensorrt_llm
    from trtllm_disagg.engines.recording import llm as recording

    # Forced, because TensorRT-LLM may be installed.
    mount_as_tensorrt_llm(force=True)
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == ROOT]:
        for name in set(recording.__all__) & vars(module).keys():
            setattr(module, name, getattr(recording, name))


if __name__ == "__main__":
    main()
