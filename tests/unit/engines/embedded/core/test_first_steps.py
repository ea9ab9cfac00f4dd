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
from tests.support.cores import Core
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
def test_weights_that_are_no_numbers_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, tensor: str, value: float
) -> None:
    model = Path(shutil.copytree(checkpoints(), tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    weights[tensor].view(-1)[7] = value
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="/model gives logits that are not finite"):
        Core(model)


@pytest.mark.parametrize("tokens_per_block", [1, 2, 32])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_warm_up_steps_fit_into_the_smallest_pools(
    checkpoints: Checkpoints, tokens_per_block: int, blocks: int
) -> None:
    pool = {"max_tokens": blocks * tokens_per_block, "tokens_per_block": tokens_per_block}
    core = Core(checkpoints(), kv_cache_config=pool, max_seq_len=blocks * tokens_per_block)
    core.generate([5], 1)
    assert core.engine.blocks.num_available == blocks
    core.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_up_compiles_exactly_the_kernels_that_steps_call(checkpoints: Checkpoints, dtype: str) -> None:
    """In a process of its own: here, other tests have had the kernels compiled, those of both dtypes."""
    program = """
import json, sys
from pathlib import Path
from numba.core.registry import CPUDispatcher
from trtllm_disagg.engines.embedded.cpu_kernels import (
    decode_attention, decode_step, layer_kernels, prefill_attention
)
from tests.support.cores import Core

def compiled():
    return {
        name: len(kernel.signatures)
        for module in (decode_attention, decode_step, layer_kernels, prefill_attention)
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
    done = subprocess.run(
        [sys.executable, "-c", program, str(checkpoints()), dtype], check=True, capture_output=True, text=True
    )
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert sum(before.values()) > 0
    assert before == after
    assert [
        name for name in ("attend_heads", "attend_rows", "attend_tile", "_attend") if before[name] > 1
    ] == []
