"""How a model is computed here: in which dtype, by which products and kernels. Decided once, before it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from trtllm_disagg.embedded.cpu_kernels.cpu import SETTING, CpuFeatures
from trtllm_disagg.embedded.kv_cache.pool import KvPool
from trtllm_disagg.embedded.model.forward import Forward, HfForward, PlainForward
from trtllm_disagg.embedded.model.layer_ops import LayerOps
from trtllm_disagg.embedded.model.model_loader import ForwardKind
from trtllm_disagg.embedded.model.pack import Pack, TiledLinear, convert_rest, pack_experts, pack_linears
from trtllm_disagg.embedded.model.plain_model import supports, take_apart
from trtllm_disagg.embedded.params.checkpoint import count_weights
from trtllm_disagg.embedded.params.llm_args import EmbeddedConfig, LlmArgs
from trtllm_disagg.embedded.params.model_config import ModelConfig
from trtllm_disagg.embedded.params.model_shape import ModelShape, available_bytes
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.activity import Reporter

#: Of the memory that is available, for float32 copies of bfloat16 weights.
_MOST_OF_MEMORY = 0.8
_KEY = "embedded.weights"


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    config: ModelConfig
    #: The lean forward, or transformers' modules.
    kind: ForwardKind
    #: Of all numbers between the weights, the KV pool and the logits.
    dtype: torch.dtype
    #: How products are computed; None: as transformers does.
    pack: Pack | None = None
    #: What lies between them.
    ops: LayerOps = field(default_factory=LayerOps)
    #: How they are held, on every rank.
    weights: Literal["auto", "float32", "bfloat16"] = "auto"
    #: For the log.
    remarks: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """A token's bits depend on its request only, not on what else runs (test_exactness.py)."""
        return self.pack is not None and self.dtype == torch.float32

    def told_to_all(self, args: LlmArgs) -> LlmArgs:
        """With what was decided here by the memory that is free now: every rank must decide the same."""
        embedded = args.embedded.model_copy(update={"weights": self.weights})
        return args.model_copy(update={"embedded": embedded})

    def make_forward(
        self, model: Any, pool: KvPool, max_positions: int, reporter: Reporter | None = None
    ) -> Forward:
        """The model as a step calls it. `model` is load_model's, and cannot be used afterwards."""
        if self.pack is None:
            return HfForward(model.to(pool.kv.device), pool)
        if self.kind == "plain":
            self.ops.prepare(pool, self.dtype)
            kv_heads = pool.kv.shape[-2]
            plain = take_apart(model, self.config, max_positions, kv_heads, self.pack, reporter)
            return PlainForward(plain, pool, self.dtype, self.ops)
        pack_experts(model, self.pack, self.ops)
        pack_linears(model, self.pack)
        convert_rest(model, self.dtype)
        return HfForward(model, pool)


def choose_forward(
    directory: Path, config: EmbeddedConfig, shape: ModelShape, device: torch.device, cpu: CpuFeatures
) -> ForwardPlan:
    """With embedded.forward `transformers` its own modules run even where a leaner forward is known. Raises
    ConfigError for embedded.weights that the model does not have.
    """
    if device.type == "cuda":
        return ForwardPlan(shape.config, "modules", shape.torch_dtype)
    if config.weights == "bfloat16" and shape.dtype != "bfloat16":
        raise ConfigError.bad_value(_KEY, config.weights, "auto or float32, for a float32 model")
    is_lean = config.forward == "auto" and supports(shape.config)
    plan = ForwardPlan(
        shape.config,
        "plain" if is_lean else "modules",
        torch.float32,
        ops=_compiled_ops() if cpu.compiles else LayerOps(),
        weights="float32",
        remarks=(f"CPU level {cpu} ({SETTING} can lower it)",),
    )
    return _with_products(plan, directory, config, shape, cpu)


def _compiled_ops() -> LayerOps:
    """Imports numba, which need not be there otherwise."""
    from trtllm_disagg.embedded.model.compiled_ops import CompiledOps

    return CompiledOps()


def _with_products(
    plan: ForwardPlan, directory: Path, config: EmbeddedConfig, shape: ModelShape, cpu: CpuFeatures
) -> ForwardPlan:
    library = _packed_linear() if cpu.compiles else None
    if shape.dtype == "bfloat16":
        if library is not None and cpu.has_bfloat16 and config.weights != "float32":
            return replace(plan, dtype=torch.bfloat16, pack=library, weights="bfloat16")
        said = "a bfloat16 model, computed in float32"
        if config.weights == "bfloat16" or (config.weights == "auto" and not _has_room(directory)):
            remark = f"{said}; its weights stay bfloat16, which makes every step slower ({_KEY})"
            kept = partial(TiledLinear, kept=torch.bfloat16)
            return replace(plan, pack=kept, weights="bfloat16", remarks=(*plan.remarks, remark))
        plan = replace(plan, remarks=(*plan.remarks, f"{said}, its weights take twice their size"))
    if library is not None:
        return replace(plan, pack=partial(library, dtype=torch.float32))
    is_slow = ("torch's own products, which are slower",) if cpu.compiles else ()
    return replace(plan, pack=TiledLinear, remarks=(*plan.remarks, *is_slow))


def _has_room(directory: Path) -> bool:
    """For all weights as float32, and what a step needs besides."""
    return 4 * count_weights(directory) < _MOST_OF_MEMORY * available_bytes()


def _packed_linear() -> Callable[..., nn.Module] | None:
    """None where torch's private operators are others than expected."""
    from trtllm_disagg.embedded.model.linear import PackedLinear, packing_works

    return PackedLinear if packing_works() else None
