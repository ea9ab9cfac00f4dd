"""Compiles kernels before the first engine starts.

`python -m trtllm_disagg.engines.embedded.core.precompile [DTYPE ...]` runs a model of one layer with constant weights,
since kernels depend only on dtypes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from safetensors.torch import save_file

from trtllm_disagg.common.exits import ending_as_on_ctrl_c
from trtllm_disagg.common.steadily import steadily
from trtllm_disagg.engines.embedded.core.build import build_core
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.params.model_config import expected_weights, read_config

DTYPES = ("float32", "bfloat16")

_WIDTH, _POSITIONS = 64, 128
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _WIDTH,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": _WIDTH,
    "max_position_embeddings": _POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def precompile(dtype: str) -> None:
    """Compile all that an engine for models of this dtype needs; fast if it is cached."""
    # A second thread compiles what the helper threads run.
    torch.set_num_threads(2)
    with ending_as_on_ctrl_c(), tempfile.TemporaryDirectory(prefix="trtllm-disagg-") as name:
        _write_model(Path(name), dtype)
        arguments = {
            "model": name,
            "kv_cache_config": {"max_tokens": _POSITIONS},
            "embedded": {"device": "cpu"},
        }
        build_core(LlmArgs.model_validate(arguments), wake=lambda: None).close()


def _write_model(directory: Path, dtype: str) -> None:
    (directory / "config.json").write_text(json.dumps(_CONFIG | {"dtype": dtype}))
    kind = getattr(torch, dtype)
    shapes = expected_weights(read_config(directory))
    weights = {name: torch.ones(shape, dtype=kind) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def main(dtypes: Seq[str]) -> int:
    """Compile all dtypes at once, each in its own process. Returns 0 on success."""
    if not this_cpu().compiles:
        return 0
    if len(dtypes) == 1:
        precompile(dtypes[0])
        return 0
    command = (sys.executable, "-P", "-m", "trtllm_disagg.engines.embedded.core.precompile")
    with steadily("compiling kernels (once)"):
        processes = [subprocess.Popen((*command, dtype)) for dtype in dtypes or DTYPES]
        # A process that a signal ended has a negative status.
        return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
