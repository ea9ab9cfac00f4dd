"""Kernels that are compiled before the first engine starts.

`python -m trtllm_disagg.engines.embedded.core.precompile [DTYPE ...]` compiles them by a model of one layer with
random weights: what is compiled depends on the types of numbers only.
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

from trtllm_disagg.engines.embedded.core.build import build_core
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.params.model_config import expected_weights, read_config
from trtllm_disagg.processes.exits import ending_as_on_ctrl_c
from trtllm_disagg.processes.steadily import steadily

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
    """All that an engine for models of this dtype needs; done at once when it is there already."""
    # With a second thread, what the threads beside the first one run is compiled too.
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
    """Every dtype in a process of its own, at the same time. Exit status 0: all is there."""
    if not this_cpu().compiles:
        return 0
    if len(dtypes) == 1:
        precompile(dtypes[0])
        return 0
    command = (sys.executable, "-P", "-m", "trtllm_disagg.engines.embedded.core.precompile")
    with steadily("compiling kernels (once)"):
        processes = [subprocess.Popen((*command, dtype)) for dtype in dtypes or DTYPES]
        # That of a process which a signal has ended is negative.
        return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
