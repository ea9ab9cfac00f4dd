"""The steps before the first request: what they find out, and what they leave for it to do."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import Checkpoints
from tests.cores import Core
from trtllm_disagg.errors import ConfigError


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        ("model.layers.2.mlp.down_proj.weight", math.nan),
        ("model.layers.0.self_attn.k_proj.weight", math.inf),
        ("model.norm.weight", math.nan),
        ("lm_head.weight", math.inf),
    ],
)
def test_weights_that_are_no_numbers(
    checkpoints: Checkpoints, tmp_path: Path, tensor: str, value: float
) -> None:
    model = Path(shutil.copytree(checkpoints(), tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    weights[tensor].view(-1)[7] = value
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"/model gives logits that are not finite numbers; its weights are"
    ):
        Core(model)


@pytest.mark.parametrize("tokens_per_block", [1, 2, 32])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_the_smallest_pools_have_room_for_them(
    checkpoints: Checkpoints, tokens_per_block: int, blocks: int
) -> None:
    pool = {"max_tokens": blocks * tokens_per_block, "tokens_per_block": tokens_per_block}
    core = Core(checkpoints(), kv_cache_config=pool, max_seq_len=blocks * tokens_per_block)
    core.generate([5], 1)
    assert core.engine.blocks.num_available == blocks
    core.close()


def test_nothing_is_left_to_compile(checkpoints: Checkpoints) -> None:
    """In a process of its own: here, other tests have had the kernels compiled."""
    program = """
import json, sys
from pathlib import Path
from numba.core.registry import CPUDispatcher
from trtllm_disagg.embedded import attend_kernels, decode_step, kernels
from tests.cores import Core

def compiled():
    return {
        f"{module.__name__}.{name}": len(kernel.signatures)
        for module in (attend_kernels, decode_step, kernels)
        for name, kernel in vars(module).items() if isinstance(kernel, CPUDispatcher)
    }

core = Core(Path(sys.argv[1]), dtype=sys.argv[2])
before = compiled()
first = core.add(range(5, 45), 12)
core.step()
core.step()
core.run(first, core.add(range(50, 110), 12))
core.close()
print(json.dumps([before, compiled()]))
"""
    for dtype in ("float32", "bfloat16"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(checkpoints()), dtype],
            check=True,
            capture_output=True,
            text=True,
        )
        before, after = json.loads(done.stdout.splitlines()[-1])
        assert sum(before.values()) > 0
        assert before == after


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_compiled_ahead_are_those_that_steps_call(checkpoints: Checkpoints, dtype: str) -> None:
    """In a process of its own, since kernels of both dtypes have been compiled here."""
    program = """
import json, sys
from pathlib import Path
from trtllm_disagg.embedded import attend_kernels, decode_step
from tests.cores import Core

Core(Path(sys.argv[1]), dtype=sys.argv[2]).close()
kernels = (attend_kernels.attend_heads, attend_kernels.attend_rows, decode_step._attend)
print(json.dumps([kernel.py_func.__name__ for kernel in kernels if len(kernel.signatures) > 1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(checkpoints()), dtype], check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
