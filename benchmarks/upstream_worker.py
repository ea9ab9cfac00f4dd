"""Runs Dynamo's own worker, `python -m dynamo.trtllm`, on the recording engine, or on TensorRT-LLM if --engine says so.

Takes the flags of this project's worker, and removes those that Dynamo's lacks.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from trtllm_disagg.common.interpreter import python
from trtllm_disagg.errors import ConfigError

#: Runs this file, which imports nothing of benchmarks/: that is not installed.
UPSTREAM_COMMAND = python(str(Path(__file__).resolve()))
MODULE = "dynamo.trtllm"
#: Modules that Dynamo's worker imports and TensorRT-LLM brings: module -> distribution.
_BROUGHT = {"PIL": "pillow", "blake3": "blake3"}


def require_upstream() -> None:
    """Raises ConfigError if Dynamo's worker cannot start here."""
    missing = [package for module, package in _BROUGHT.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"--upstream: {MODULE} needs {' and '.join(missing)}; pip install -r benchmarks/requirements.txt"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until Dynamo's worker ends."""
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("--disaggregation-strategy")
    ours.add_argument("--engine")
    known, theirs = ours.parse_known_args(arguments)
    if known.engine != "tensorrt_llm":
        mount_recording_engine()
        theirs += ["--gpus-per-node", "1"]
    sys.argv = [MODULE, *theirs]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


def mount_recording_engine() -> None:
    """Mount the embedded engine as tensorrt_llm, then replace its names by the recording engine's."""
    # Imported here: benchmarks import this module without an engine. A checkout's folders are not installed.
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.support.mount import ROOT, mount_as_tensorrt_llm
    from trtllm_disagg.engines.recording import llm as recording

    # Forced, since TensorRT-LLM may be installed.
    mount_as_tensorrt_llm()
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == ROOT]:
        for name in set(recording.__all__) & vars(module).keys():
            setattr(module, name, getattr(recording, name))


if __name__ == "__main__":
    main()
