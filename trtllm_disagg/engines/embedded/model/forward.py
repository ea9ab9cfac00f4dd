"""Runs a step's rows through the model, decode rows and prefill chunks in one forward. `choose_forward` decides on
dtype, products and kernels before `load_model`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import nn

from trtllm_disagg.common.reports import Reporter
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import SETTING, CpuFeatures
from trtllm_disagg.engines.embedded.kv_cache.pool import KvPool
from trtllm_disagg.engines.embedded.model import attention
from trtllm_disagg.engines.embedded.model.attention import StepLayout
from trtllm_disagg.engines.embedded.model.layer_ops import LayerOps, replace_activations
from trtllm_disagg.engines.embedded.model.layers import PlainLayer, PlainModel
from trtllm_disagg.engines.embedded.model.pack import (
    Pack,
    TiledLinear,
    convert_others,
    pack_experts,
    pack_linears,
)
from trtllm_disagg.engines.embedded.model.plain_model import (
    read_plain,
    supports,
    take_apart,
)
from trtllm_disagg.engines.embedded.model.rows import ForwardRow
from trtllm_disagg.engines.embedded.params.llm_args import EmbeddedConfig, LlmArgs
from trtllm_disagg.engines.embedded.params.model_config import ModelConfig, count_weights, require_all, shown
from trtllm_disagg.engines.embedded.params.model_shape import ModelShape, available_bytes
from trtllm_disagg.errors import ConfigError

#: Maximum share of free memory for float32 copies of bfloat16 weights.
_MAX_MEMORY_SHARE = 0.8
_KEY = "embedded.weights"
#: The plain forward, or transformers' modules.
ForwardKind = Literal["plain", "modules"]


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    config: ModelConfig
    kind: ForwardKind
    #: dtype of all numbers from the weights to the KV pool and the logits.
    dtype: torch.dtype
    #: Computes products; None: transformers does.
    pack: Pack | None = None
    #: Computes what lies between products.
    ops: LayerOps = field(default_factory=LayerOps)
    #: dtype that holds the weights, on every rank.
    weights: Literal["auto", "float32", "bfloat16"] = "auto"
    #: For the log.
    remarks: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if a token's bits depend only on its request (test_exactness.py)."""
        return self.pack is not None and self.dtype == torch.float32

    def for_all_ranks(self, args: LlmArgs) -> LlmArgs:
        """`args` with the choice that depended on free memory: every rank must make the same one."""
        embedded = args.embedded.model_copy(update={"weights": self.weights})
        return args.model_copy(update={"embedded": embedded})

    def make_forward(
        self, model: Any, pool: KvPool, max_positions: int, reporter: Reporter | None = None
    ) -> Forward:
        """The model as a step calls it. Consumes `model`, which `load_model` made."""
        if self.pack is None:
            return HfForward(model.to(pool.kv.device), pool)
        if self.kind == "plain":
            self.ops.prepare(pool, self.dtype)
            kv_heads = pool.kv.shape[-2]
            plain = take_apart(model, self.config, max_positions, kv_heads, self.pack, reporter)
            return PlainForward(plain, pool, self.dtype, self.ops)
        pack_experts(model, self.pack, self.ops)
        pack_linears(model, self.pack)
        if self.dtype == torch.float32:
            replace_activations(model)
        convert_others(model, self.dtype)
        return HfForward(model, pool)


def choose_forward(
    directory: Path, config: EmbeddedConfig, shape: ModelShape, device: torch.device, cpu: CpuFeatures
) -> ForwardPlan:
    """Raises ConfigError for embedded.weights that the model does not have."""
    if device.type == "cuda":
        return ForwardPlan(shape.config, "modules", shape.torch_dtype)
    if config.weights == "bfloat16" and shape.dtype != "bfloat16":
        raise ConfigError.bad_value(_KEY, config.weights, "auto or float32, for a float32 model")
    is_plain = config.forward == "auto" and supports(shape.config)
    plan = ForwardPlan(
        shape.config,
        "plain" if is_plain else "modules",
        torch.float32,
        ops=_compiled_ops() if cpu.compiles else LayerOps(),
        weights="float32",
        remarks=(f"CPU level {cpu} ({SETTING} can lower it)",),
    )
    return _with_products(plan, directory, config, shape, cpu)


def _compiled_ops() -> LayerOps:
    """Imports numba only if it is needed."""
    from trtllm_disagg.engines.embedded.model.compiled_ops import CompiledOps

    return CompiledOps()


def _with_products(
    plan: ForwardPlan, directory: Path, config: EmbeddedConfig, shape: ModelShape, cpu: CpuFeatures
) -> ForwardPlan:
    library = _packed_linear() if cpu.compiles else None
    if shape.dtype == "bfloat16":
        if library is not None and cpu.has_bfloat16 and config.weights != "float32":
            return replace(plan, dtype=torch.bfloat16, pack=library, weights="bfloat16")
        said = "bfloat16 model, computed in float32"
        if config.weights == "bfloat16" or (config.weights == "auto" and not _has_room(directory)):
            remark = f"{said}; its weights stay bfloat16, which makes every step slower ({_KEY})"
            kept = partial(TiledLinear, kept=torch.bfloat16)
            return replace(plan, pack=kept, weights="bfloat16", remarks=(*plan.remarks, remark))
        plan = replace(plan, remarks=(*plan.remarks, f"{said}; its weights take twice the memory"))
    if library is not None:
        return replace(plan, pack=partial(library, dtype=torch.float32))
    is_slow = ("torch's own products, which are slower",) if cpu.compiles else ()
    return replace(plan, pack=TiledLinear, remarks=(*plan.remarks, *is_slow))


def _has_room(directory: Path) -> bool:
    """True if memory has room for all weights as float32 and for a step."""
    return 4 * count_weights(directory) < _MAX_MEMORY_SHARE * available_bytes()


def _packed_linear() -> Callable[..., nn.Module] | None:
    """None if torch's private operators have changed."""
    from trtllm_disagg.engines.embedded.model.linear import PackedLinear, packing_works

    return PackedLinear if packing_works() else None


class Forward(Protocol):
    """A model. It knows nothing of requests, phases or disaggregation."""

    def __call__(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Logits (tokens, vocabulary) of the tokens in `layout.last`. Valid until the next call."""

    def close(self) -> None: ...


class ModelRunner:
    def __init__(self, forward: Forward, pool: KvPool, ops: LayerOps) -> None:
        self.forward = forward
        self.pool = pool
        self._ops = ops

    @torch.inference_mode()
    def run(self, rows: Seq[ForwardRow]) -> torch.Tensor:
        """Logits (sum of `num_logits`, vocabulary), in the order of `rows`."""
        tokens = [token for row in rows for token in row.tokens]
        ops, pool = self._ops, self.pool
        layout = StepLayout(rows, pool, ops.decode_rows(rows, pool), ops.prefill_rows(rows, pool))
        return self.forward(tokens, layout)

    def close(self) -> None:
        self.forward.close()


class HfForward:
    """Any unmodified decoder of transformers over our attention."""

    def __init__(self, model: Any, pool: KvPool) -> None:
        self._model = model
        self._device = pool.kv.device

    def __call__(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Logits (tokens, vocabulary) of the tokens in `layout.last`."""
        output = self._model(
            input_ids=torch.tensor([tokens], device=self._device),
            position_ids=layout.positions,
            use_cache=False,
            # transformers applies the head, with any softcap, to these positions only.
            logits_to_keep=layout.last,
            paged=layout,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def close(self) -> None:
        """Does nothing: there are no threads."""


class PlainForward:
    """A plain decoder on the CPU: four matrix products per layer, one operation between each.

    Equals transformers' modules (test_families.py) with a fraction of their operations. If `LayerOps` has one, a step
    of decode rows only is one compiled call (compiled_ops.py).
    """

    def __init__(self, model: PlainModel, pool: KvPool, dtype: torch.dtype, ops: LayerOps) -> None:
        """Computes in `dtype`, as the products of `model` do."""
        self._model = model
        self._dtype = dtype
        self._ops = ops
        self.fused = ops.fused_decode(model, pool, dtype)

    def __call__(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Logits (tokens, vocabulary) of the tokens in `layout.last`. Valid until the next step."""
        if self.fused is not None and layout.all_decode and len(tokens) <= self.fused.max_rows:
            return self.fused(tokens, layout)
        model, layers = self._model, self._model.layers
        x = model.embedding[torch.tensor(tokens)].float()
        for start, vectors in layout.images:
            x[start : start + len(vectors)] = vectors
        hidden = torch.empty(x.shape, dtype=self._dtype)
        self._ops.add_rms_norm(x, None, layers[0].input_norm, model.eps, hidden)
        for i, layer in enumerate(layers):
            is_last = i == len(layers) - 1
            # (tokens, hidden) -> (tokens, heads * dim)
            query = self._ops.rotate_and_store(layer.qkv(hidden), layout, i, layer, model)
            attended = layout.attend_stored(layer.attention, query, last_only=is_last)
            attended = attended.view(len(tokens), -1)
            if is_last:
                # Only these need logits.
                attended, x = attended[layout.last], x[layout.last]
                hidden = torch.empty(x.shape, dtype=self._dtype)
            norm = model.final_norm if is_last else layers[i + 1].input_norm
            self._feed_forward(layer, attended, x, hidden, norm)
        logits: torch.Tensor = model.head(hidden)
        return logits

    def close(self) -> None:
        if self.fused is not None:
            self.fused.close()

    def _feed_forward(
        self,
        layer: PlainLayer,
        attended: torch.Tensor,
        residual: torch.Tensor,
        hidden: torch.Tensor,
        next_norm: np.ndarray,
    ) -> None:
        """Add attention and feed-forward to the residual; `hidden` becomes the next layer's normalised input."""
        ops, eps = self._ops, self._model.eps
        ops.add_rms_norm(residual, layer.output(attended), layer.post_norm, eps, hidden)
        activated = ops.silu_mul(layer.gate_up(hidden))
        ops.add_rms_norm(residual, layer.down(activated), next_norm, eps, hidden)


def load_model(directory: Path, shape: ModelShape, kind: ForwardKind) -> Any:
    """transformers' model, or for `plain` a tree with its weights. Raises ConfigError for a broken checkpoint."""
    try:
        if kind == "plain" and (plain := read_plain(directory, shape.config, shape.torch_dtype)):
            return plain
        if shape.image_tokens is not None:
            allowed = "auto, on the CPU, for a model that takes images: a plain decoder in float32, bfloat16 or float16"
            raise ConfigError.bad_value("embedded.forward", kind, allowed)
        return _load_with_transformers(directory, shape)
    except ConfigError:
        raise
    except Exception as error:  # a wrong setting may raise anything
        raise ConfigError(f"model: cannot load {directory}: {type(error).__name__}: {error}") from error


def _load_with_transformers(directory: Path, shape: ModelShape) -> Any:
    """transformers' model in eval mode with our attention."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # Our error below reports all its findings.
    transformers_logging.set_verbosity_error()
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=shape.torch_dtype,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    # transformers would continue with random weights, or without.
    if wrong := sorted(name for name, *_ in report["mismatched_keys"]):
        raise ConfigError(f"model: {directory}: the shape of {shown(wrong)} does not match config.json")
    require_all(directory, sorted(report["missing_keys"]), report["unexpected_keys"], shape.config)
    # Registered without a mask function, so that transformers builds no mask.
    model.config._attn_implementation = attention.NAME
    # A training option that config.json may still have; a packed router (pack.py) returns no logits.
    model.config.output_router_logits = False
    model.config.return_dict = True
    return model.eval().requires_grad_(False)
