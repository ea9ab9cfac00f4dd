"""The engine's tests once more at lower CPU levels: `python -m tests.levels`.

A level must be in the environment before torch is imported, so each is a pytest of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

from trtllm_disagg.engines.embedded.cpu_kernels.cpu import SETTING, environment_of, this_cpu

#: Dtypes, exactness, handoffs. Chunks and reuse are in test_bfloat16. A guide is the same whatever computed the logits,
#: and so is a transport.
_EVERY = (
    "tests/unit/engines/embedded/model/test_bfloat16.py",
    "tests/unit/engines/embedded/model/test_experts.py",
    "tests/unit/engines/embedded/model/test_exactness.py::test_logits_in_a_batch_have_the_bits_of_solo_requests",
    "tests/unit/engines/embedded/model/test_exactness.py::test_logits_after_a_handoff_have_the_bits_of_solo_requests",
)
#: Where kernels are compiled.
_COMPILED = (
    "tests/unit/engines/embedded/model/test_families.py",
    "tests/unit/engines/embedded/model/test_linear.py",
    "tests/unit/engines/embedded/model/test_panels.py",
    "tests/unit/engines/embedded/model/test_fused_decode.py",
    "tests/unit/engines/embedded/model/test_prefill_attention.py",
    "tests/unit/engines/embedded/core/test_first_steps.py",
)
_CHOSEN = {"avx2": (*_EVERY, *_COMPILED), "torch": _EVERY}
#: What runs without kernels is the same at every level.
_SKIPPED = {"avx2": "NIXL or [torch- or [transformers-", "torch": "NIXL"}


def main() -> int:
    """0 when every level that is below this machine's own passes."""
    own = this_cpu().level
    below = ["avx2", "torch"] if own == "avx512" else ["torch"] if own != "torch" else []
    return max((_run(level, _CHOSEN[level]) for level in below), default=0)


def _run(level: str, files: tuple[str, ...]) -> int:
    print(f"the engine's tests at CPU level {level}", flush=True)
    environment = dict(os.environ) | {SETTING: level}
    environment |= environment_of(environment)
    command = (sys.executable, "-m", "pytest", "-q", "-n", "2", "-k", f"not ({_SKIPPED[level]})", *files)
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
