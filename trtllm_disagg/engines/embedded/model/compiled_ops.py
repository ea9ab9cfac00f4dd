"""`LayerOps` by compiled kernels (layer_kernels.py, the two attentions), float32 or bfloat16; and decode steps of a
plain model as one compiled call (decode_step.py), with its weights, buffers and threads.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager

import numpy as np
import torch

from trtllm_disagg.common.reports import Reporter
from trtllm_disagg.engines.embedded.cpu_kernels import (
    decode_attention,
    decode_step,
    layer_kernels,
    prefill_attention,
)
from trtllm_disagg.engines.embedded.cpu_kernels.compiled import reporting_compilation
from trtllm_disagg.engines.embedded.cpu_kernels.decode_step import (
    DOWN,
    HEAD,
    OUTPUT,
    QKV,
    ROWS,
    STOP,
    Buffers,
    Weights,
)
from trtllm_disagg.engines.embedded.cpu_kernels.gemm_small_m import PANEL
from trtllm_disagg.engines.embedded.cpu_kernels.layer_kernels import as_array, parts_of
from trtllm_disagg.engines.embedded.cpu_kernels.prefill_attention import QUERIES
from trtllm_disagg.engines.embedded.kv_cache.pool import KvPool
from trtllm_disagg.engines.embedded.model.attention import StepLayout
from trtllm_disagg.engines.embedded.model.layer_ops import LayerOps
from trtllm_disagg.engines.embedded.model.layers import LayerAttention, PlainLayer, PlainModel
from trtllm_disagg.engines.embedded.model.linear import MAX_ROWS, PackedLinear, Panels
from trtllm_disagg.engines.embedded.model.rows import ForwardRow


class DecodeRows:
    """A step's leading rows, which decode: block offsets in the pool, and lengths, for every layer."""

    def __init__(self, rows: Seq[ForwardRow], pool: KvPool) -> None:
        self.count = len(rows)
        self._pool = pool
        size = pool.tokens_per_block
        self._contexts = np.array([row.num_computed + 1 for row in rows], np.int64)
        lengths = -(-self._contexts // size)
        self.tables = _tables(rows, lengths, pool)
        #: (rows,) int64: each token's position in its sequence, and its place in the pool.
        self.positions = self._contexts - 1
        self.places = self.tables[np.arange(self.count), self.positions // size] + self.positions % size
        self._starts: dict[int, np.ndarray] = {}
        self._longest = int(self._contexts.max())
        self._scores = np.empty((0, 0), np.float32)

    @classmethod
    def of(cls, rows: Seq[ForwardRow], pool: KvPool) -> DecodeRows | None:
        """None if no row decodes. The scheduler puts decode rows first."""
        decode = [row for row in rows if not row.in_prefill]
        return cls(decode, pool) if decode else None

    def attend(
        self, how: LayerAttention, query: torch.Tensor, out: torch.Tensor, *, last_only: bool = False
    ) -> None:
        """query and out (rows, heads, dim). Every token has logits."""
        if self._scores.shape[0] < query.shape[1]:
            self._scores = np.empty((query.shape[1], self._longest), np.float32)
        decode_attention.attend_rows(
            as_array(query),
            as_array(self._pool.rows),
            self._pool.key_row(how.layer),
            self._pool.tokens_per_block,
            self.tables,
            self._contexts,
            self._starts_for(how.window or 0),
            np.float32(how.scale),
            np.float32(how.softcap or 0.0),
            self._scores,
            as_array(out),
        )

    def _starts_for(self, window: int) -> np.ndarray:
        """The first position that each row attends to."""
        if window not in self._starts:
            seen = np.maximum(self._contexts - window, 0) if window else np.zeros_like(self._contexts)
            self._starts[window] = seen
        return self._starts[window]


class PrefillRows:
    """A step's rows in prefill: block offsets in the pool, and tiles of queries."""

    def __init__(self, rows: Seq[ForwardRow], first: int, pool: KvPool) -> None:
        """`first`: index of the first token in the step."""
        self.count = len(rows)
        self._rows = rows
        self._pool = pool
        size = pool.tokens_per_block
        ends = np.array([row.num_computed + row.num_tokens for row in rows], np.int64)
        self._tables = _tables(rows, -(-ends // size), pool)
        #: (tokens,) int64: each token's position in its sequence, and its place in the pool.
        self.positions = np.concatenate(
            [np.arange(row.num_computed, end) for row, end in zip(rows, ends, strict=True)]
        )
        of_row = np.repeat(np.arange(len(rows)), [row.num_tokens for row in rows])
        self.places = self._tables[of_row, self.positions // size] + self.positions % size
        self._firsts = first + np.cumsum([0, *(row.num_tokens for row in rows[:-1])])
        self._tiles: dict[tuple[int, bool], np.ndarray] = {}

    @classmethod
    def of(cls, rows: Seq[ForwardRow], pool: KvPool) -> PrefillRows | None:
        """None if no row is in prefill, or the kernel does not support the heads."""
        prefill = [row for row in rows if row.in_prefill]
        if not prefill or not prefill_attention.takes(as_array(pool.rows)):
            return None
        return cls(prefill, len(rows) - len(prefill), pool)

    def attend(
        self, how: LayerAttention, query: torch.Tensor, out: torch.Tensor, *, last_only: bool = False
    ) -> None:
        """query and out (tokens, heads, dim), of all the step's rows. `last_only` computes only tokens with logits."""
        pool = self._pool
        kv_heads = pool.kv.shape[-2]
        tiles = self._tiles_for(query.shape[1] // kv_heads, last_only)
        prefill_attention.attend_tiles(
            len(tiles) * kv_heads,
            tiles,
            as_array(query),
            as_array(pool.rows),
            pool.key_row(how.layer),
            pool.tokens_per_block,
            self._tables,
            np.float32(how.scale),
            np.float32(how.softcap or 0.0),
            how.window or 0,
            as_array(out),
        )

    def _tiles_for(self, group: int, last_only: bool) -> np.ndarray:
        """Tiles for `prefill_attention.attend_tile`, the longest first so that threads end together. `group`: query
        heads per KV head.
        """
        if (group, last_only) not in self._tiles:
            tiles = []
            for i, row in enumerate(self._rows):
                begin = row.num_tokens - row.num_logits if last_only else 0
                end = row.num_tokens * group
                for first in range(begin * group, end, QUERIES):
                    count = min(QUERIES, end - first)
                    tiles.append((i, self._firsts[i], row.num_computed, first, count))
            tiles.sort(key=lambda tile: -(tile[2] + tile[3] // group))
            self._tiles[group, last_only] = np.array(tiles, np.int64).reshape(-1, 5)
        return self._tiles[group, last_only]


def _tables(rows: Seq[ForwardRow], lengths: np.ndarray, pool: KvPool) -> np.ndarray:
    """(rows, blocks) int64: offsets of each row's blocks in the pool; `lengths`: numbers of blocks."""
    tables = np.zeros((len(rows), int(lengths.max())), np.int64)
    for table, row, length in zip(tables, rows, lengths, strict=True):
        table[:length] = row.blocks[:length]
    tables *= pool.rows_per_block
    return tables


log = logging.getLogger(__name__)


class FusedDecode:
    """Runs one step at a time, for one caller thread. `close` ends the helper threads."""

    max_rows = MAX_ROWS

    def __init__(
        self,
        model: PlainModel,
        products: list[list[PackedLinear]],
        pool: KvPool,
        dtype: torch.dtype,
        num_threads: int,
    ) -> None:
        self._model = model  # owns the weights' memory
        self._tokens_per_block = pool.tokens_per_block
        self._num_threads = num_threads
        self._weights = _weights(model, products)
        self._buffers = _buffers(model, products[0], pool, dtype, num_threads)
        self._logits = torch.from_numpy(self._buffers.logits)[:, : products[0][HEAD].out_features]
        decode_step.compile_ahead(num_threads, self._weights, self._buffers, self._tokens_per_block)
        self._events = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(1, num_threads)]
        self.threads = [
            threading.Thread(target=self._serve, args=(rank,), name="decode-step", daemon=True)
            for rank in range(1, num_threads)
        ]
        for thread in self.threads:
            thread.start()

    @classmethod
    def create(
        cls, model: PlainModel, pool: KvPool, dtype: torch.dtype, num_threads: int
    ) -> FusedDecode | None:
        """Computes in `dtype`. None unless the kernels know every weight and fill whole panels, or with several ranks,
        which gather between products.
        """
        products = [
            [layer.qkv, layer.output, layer.gate_up, layer.down, model.head] for layer in model.layers
        ]
        packed = [[linear for linear in row if isinstance(linear, PackedLinear)] for row in products]
        if any(len(row) < len(products[0]) for row in packed):
            return None
        if unfit := [linear for row in packed for linear in row if linear.panels is None]:
            _log_unfused(unfit[0], "the kernels do not know oneDNN's packing of it")
            return None
        odd = [linear for row in packed for linear in row[:HEAD] if linear.out_features % PANEL]
        if odd := odd or [row[DOWN] for row in packed if row[DOWN].in_features % PANEL]:
            _log_unfused(odd[0], f"not a multiple of {PANEL}")
            return None
        return cls(model, packed, pool, dtype, num_threads)

    def __call__(self, tokens: Seq[int], layout: StepLayout) -> torch.Tensor:
        """Logits (sampling rows, vocabulary) float32, valid until the next step, for at most MAX_ROWS decode rows.

        A request resumed after a pause also has rows that do not sample.
        """
        buffers, rows = self._buffers, len(tokens)
        assert isinstance(layout.decode, DecodeRows)
        tables = layout.decode.tables
        buffers.tokens[:rows] = tokens
        buffers.positions[:rows] = layout.position_array
        buffers.places[:rows] = layout.place_array
        buffers.tables[:rows, : tables.shape[1]] = tables
        buffers.control[ROWS] = rows
        self._wake()
        decode_step.decode(0, self._num_threads, self._weights, buffers, self._tokens_per_block)
        return self._logits[:rows] if len(layout.last) == rows else self._logits[layout.last]

    def close(self) -> None:
        self._buffers.control[STOP] = 1
        self._wake()
        for thread in self.threads:
            thread.join(timeout=5)
        for event in self._events:
            os.close(event)
        self._events = []

    def _wake(self) -> None:
        for event in self._events:
            os.eventfd_write(event, 1)

    def _serve(self, rank: int) -> None:
        event = self._events[rank - 1]
        decode_step.serve(
            rank, self._num_threads, self._weights, self._buffers, self._tokens_per_block, event
        )


def _log_unfused(linear: PackedLinear, why: str) -> None:
    log.info(
        "decode steps are slower, with many calls instead of one: weight with %d outputs and %d inputs: %s",
        linear.out_features,
        linear.in_features,
        why,
    )


def _weights(model: PlainModel, products: list[list[PackedLinear]]) -> Weights:
    layers = model.layers
    following = [layer.input_norm for layer in layers[1:]] + [model.final_norm]
    biases = [np.stack([_bias(row[kind]) for row in products]) for kind in range(HEAD)]
    return Weights(
        embedding=as_array(model.embedding),
        panels=np.array([[_panels(linear).address for linear in row] for row in products], np.int64),
        blocks=np.array([[_panels(linear).block for linear in row] for row in products], np.int64),
        qkv_bias=biases[0],
        output_bias=biases[1],
        gate_up_bias=biases[2],
        down_bias=biases[3],
        head_bias=_bias(products[0][HEAD]),
        first_norm=layers[0].input_norm,
        post_norm=np.stack([layer.post_norm for layer in layers]),
        next_norm=np.stack(following),
        q_norm=np.stack([layer.q_norm for layer in layers]),
        k_norm=np.stack([layer.k_norm for layer in layers]),
        eps=model.eps,
        cos=model.cos,
        sin=model.sin,
        scale=np.array([layer.attention.scale for layer in layers], np.float32),
        window=np.array([layer.attention.window or 0 for layer in layers], np.int64),
    )


def _buffers(
    model: PlainModel, products: list[PackedLinear], pool: KvPool, dtype: torch.dtype, num_threads: int
) -> Buffers:
    size, dim = pool.tokens_per_block, pool.kv.shape[-1]
    hidden, inner = products[OUTPUT].out_features, products[DOWN].in_features
    longest = len(model.cos)

    def floats(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    def stored(*shape: int) -> np.ndarray:
        return as_array(torch.zeros(shape, dtype=dtype))

    def numbers(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int64)

    attended = stored(MAX_ROWS, model.num_heads, dim)
    return Buffers(
        control=numbers(8),
        tokens=numbers(MAX_ROWS),
        positions=numbers(MAX_ROWS),
        places=numbers(MAX_ROWS),
        tables=numbers(MAX_ROWS, -(-longest // size)),
        residual=floats(MAX_ROWS, hidden),
        hidden=stored(MAX_ROWS, hidden),
        qkv=floats(MAX_ROWS, products[QKV].out_features),
        query=stored(MAX_ROWS, model.num_heads, dim),
        attended=attended,
        attended_flat=attended.reshape(MAX_ROWS, -1),
        delta=floats(MAX_ROWS, hidden),
        gate_up=floats(MAX_ROWS, 2 * inner),
        activated=stored(MAX_ROWS, inner),
        logits=floats(MAX_ROWS, -(-products[HEAD].out_features // PANEL) * PANEL),
        scores=floats(num_threads, model.num_heads, longest),
        pool=as_array(pool.rows),
        like=stored(1),
    )


def _panels(linear: PackedLinear) -> Panels:
    assert linear.panels is not None
    return linear.panels


def _bias(linear: PackedLinear) -> np.ndarray:
    if linear.bias_values is None:
        return np.empty(0, np.float32)
    return linear.bias_values.float().numpy()


class CompiledOps(LayerOps):
    def reporting_compilation(self, reporter: Reporter) -> AbstractContextManager[None]:
        return reporting_compilation(reporter)

    def prepare(self, pool: KvPool, dtype: torch.dtype) -> None:
        query, rows = as_array(torch.zeros(1, 1, 1, dtype=dtype)), as_array(pool.rows)
        if not decode_attention.compile_heads_ahead(query, rows):
            prefill_attention.compile_tile_ahead(query, rows)

    def decode_rows(self, rows: Seq[ForwardRow], pool: KvPool) -> DecodeRows | None:
        return DecodeRows.of(rows, pool)

    def prefill_rows(self, rows: Seq[ForwardRow], pool: KvPool) -> PrefillRows | None:
        return PrefillRows.of(rows, pool)

    def fused_decode(self, model: PlainModel, pool: KvPool, dtype: torch.dtype) -> FusedDecode | None:
        return FusedDecode.create(model, pool, dtype, torch.get_num_threads())

    def add_rms_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: np.ndarray,
        eps: np.float32,
        out: torch.Tensor,
    ) -> None:
        parts = parts_of(len(x))
        if delta is None:
            layer_kernels.rms_norm_in_parts(parts, x.numpy(), weight, eps, as_array(out))
        else:
            layer_kernels.add_rms_norm_in_parts(parts, x.numpy(), as_array(delta), weight, eps, as_array(out))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        activated = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
        layer_kernels.silu_mul_in_parts(parts_of(len(gate_up)), as_array(gate_up), as_array(activated))
        return activated

    def rotate_and_store(
        self, qkv: torch.Tensor, layout: StepLayout, index: int, layer: PlainLayer, model: PlainModel
    ) -> torch.Tensor:
        pool = layout.pool
        query = qkv.new_empty((len(qkv), model.num_heads, pool.kv.shape[-1]))
        layer_kernels.rotate_and_store_in_parts(
            parts_of(len(qkv)),
            as_array(qkv),
            layout.position_array,
            layout.place_array,
            model.cos,
            model.sin,
            layer.q_norm,
            layer.k_norm,
            model.eps,
            as_array(pool.rows),
            pool.key_row(index),
            pool.value_row(index),
            as_array(query),
        )
        return query

    def weighted_sum(self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty((len(places), rows.shape[1]))
        layer_kernels.weighted_sum(as_array(rows), places.numpy(), weights.numpy(), as_array(out))
        return out
