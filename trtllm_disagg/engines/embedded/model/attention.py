"""Paged attention behind transformers' AttentionInterface: runs their unmodified models over our KV pool.

A step packs all rows into one (1, tokens) batch. `StepLayout` maps tokens to rows and their KV; it is built once per
step and passes through the model's forward as the keyword `paged`.

Compiled kernels compute attention if they can (compiled_ops.py), else torch. With torch, prefill queries are cut into
tiles aligned to the ABSOLUTE position, each attending to the keys up to the tile's end, even past the prompt's. So a
token's attention is the same sum in the same order for any chunking, batch, prefix cache or prompt length.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import pad

from trtllm_disagg.engines.embedded.kv_cache.pool import KvPool
from trtllm_disagg.engines.embedded.model.layers import LayerAttention
from trtllm_disagg.engines.embedded.model.rows import TILE, ForwardRow, ImageRows

NAME = "trtllm_disagg_paged"

#: Unused options of transformers that are safe to ignore; any other may change the answer, so it raises.
_HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_router_logits"}


@dataclass(slots=True)
class _Span:
    """One row: its queries in the packed batch and its keys in the pool."""

    start: int
    num_queries: int
    context: int  # number of keys that its last query sees
    blocks: torch.Tensor  # (blocks,) int64
    is_prefill: bool
    num_logits: int

    @property
    def last_tiles(self) -> _Span:
        """Its queries from the tile of the first query with logits on."""
        first = self.context - self.num_logits
        count = min(self.num_queries, self.context - first // TILE * TILE)
        return replace(self, start=self.start + self.num_queries - count, num_queries=count)


class KernelRows(Protocol):
    """Rows of a step that one kernel serves (compiled_ops.py)."""

    count: int
    #: (tokens,) int64: where each token stands in its sequence, and its place in the pool.
    positions: np.ndarray
    places: np.ndarray

    def attend(
        self, how: LayerAttention, query: torch.Tensor, out: torch.Tensor, *, last_only: bool = False
    ) -> None:
        """query and out (tokens, heads, dim). `last_only` computes only tokens with logits."""


class StepLayout:
    """Positions, pool places and keys of one step's rows."""

    def __init__(
        self,
        rows: Seq[ForwardRow],
        pool: KvPool,
        decode: KernelRows | None = None,
        prefill: KernelRows | None = None,
    ) -> None:
        """`decode`: the leading rows, and `prefill`: the others, if one kernel serves each."""
        self.pool = pool
        self.decode = decode
        self._prefill = prefill
        self._rows = rows
        start = 0 if decode is None else decode.count
        self.all_decode = start == len(rows)
        #: Rows that no kernel serves.
        self._spans: list[_Span] = []
        served = [some for some in (decode, prefill) if some is not None]
        positions, places = [some.positions for some in served], [some.places for some in served]
        for row in rows[sum(some.count for some in served) :]:
            span, span_positions, span_places = _span_of(row, start, pool)
            self._spans.append(span)
            positions.append(span_positions)
            places.append(span_places)
            start += row.num_tokens
        #: (tokens,) int64: where each token stands in its sequence, and its place in the pool.
        self.position_array = np.concatenate(positions)
        self.place_array = np.concatenate(places)
        wanted = np.array([row.num_logits for row in rows])
        begins = np.cumsum([row.num_tokens for row in rows]) - wanted
        last = np.repeat(begins - np.cumsum(wanted) + wanted, wanted) + np.arange(wanted.sum())
        #: Packed index of each token that needs logits.
        self.last = torch.from_numpy(last).to(pool.kv.device)
        self._longest = max((span.context for span in self._spans), default=0)
        self._masks: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    @cached_property
    def images(self) -> list[ImageRows]:
        """Vectors that replace embeddings, with their places in the packed batch."""
        starts = accumulate((row.num_tokens for row in self._rows), initial=0)
        return [
            ImageRows(start + image.start, image.vectors)
            for start, row in zip(starts, self._rows, strict=False)
            for image in row.images
        ]

    @cached_property
    def positions(self) -> torch.Tensor:
        """(1, tokens)"""
        return torch.from_numpy(self.position_array)[None].to(self.pool.kv.device)

    @cached_property
    def places(self) -> torch.Tensor:
        """(tokens,)"""
        return torch.from_numpy(self.place_array).to(self.pool.kv.device)

    @cached_property
    def _last_tiles(self) -> list[_Span]:
        return [span.last_tiles if span.is_prefill else span for span in self._spans if span.num_logits]

    def attend(
        self, how: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query (tokens, heads, dim), key and value (tokens, kv heads, dim) -> (tokens, heads, dim)."""
        pool = self.pool
        pool.rows.index_copy_(0, self.places + pool.key_row(how.layer), key.to(pool.kv.dtype))
        pool.rows.index_copy_(0, self.places + pool.value_row(how.layer), value.to(pool.kv.dtype))
        return self.attend_stored(how, query)

    def attend_stored(
        self, how: LayerAttention, query: torch.Tensor, *, last_only: bool = False
    ) -> torch.Tensor:
        """`attend` for K and V already in the pool. With `last_only`, rows of tokens not in `last` are undefined."""
        if self._prefill is not None:
            query = query.contiguous()
        out = torch.empty_like(query)
        if self.decode is not None:
            self.decode.attend(how, query[: self.decode.count], out[: self.decode.count])
        if self._prefill is not None:
            self._prefill.attend(how, query, out, last_only=last_only)
            return out
        for span in self._last_tiles if last_only else self._spans:
            if span.is_prefill:
                self._attend_prefill(how, span, query, out)
            elif self.decode is None:
                self._attend_decode(how, span, query, out)
        return out

    def _attend_decode(
        self, how: LayerAttention, span: _Span, query: torch.Tensor, out: torch.Tensor
    ) -> None:
        """One query: turns the heads of a KV group into query positions, to avoid repeating K and V."""
        begin = max(0, span.context - how.window) if how.window else 0
        k, v = (
            run[begin : span.context].to(query.dtype)
            for run in self.pool.keys_and_values(how.layer, span.blocks)
        )
        num_heads, dim = query.shape[1], query.shape[2]
        kv_heads = k.shape[1]
        grouped = query[span.start].view(1, kv_heads, num_heads // kv_heads, dim)
        attended = how.kernel()(grouped, k.transpose(0, 1)[None], v.transpose(0, 1)[None])
        # Not `view`: a CUDA kernel returns another memory order.
        out[span.start] = attended.reshape(num_heads, dim)

    def _attend_prefill(
        self, how: LayerAttention, span: _Span, query: torch.Tensor, out: torch.Tensor
    ) -> None:
        rows = slice(span.start, span.start + span.num_queries)
        begin = span.context - span.num_queries
        before = begin % TILE
        asked = _whole_tiles(query[rows], before)
        attended = out[rows] if len(asked) == span.num_queries else torch.empty_like(asked)
        queries, answers = _heads_first(asked), _heads_first(attended)
        keys, values = (
            _heads_first(_to_tiles_end(run.to(query.dtype), span.context))
            for run in self.pool.keys_and_values(how.layer, span.blocks)
        )
        grouped = queries.shape[1] != keys.shape[1]
        attention, window = how.kernel(), how.window or 0
        mask = self._mask(window, query.dtype)
        for at in range(0, len(asked), TILE):
            tile_start = begin - before + at
            end = tile_start + TILE
            # A windowed tile also starts at an absolute multiple, for the same sums in the same order.
            first = max(0, tile_start - window + 1) // TILE * TILE if window else 0
            answers[:, :, at : at + TILE] = attention(
                queries[:, :, at : at + TILE],
                keys[:, :, first:end],
                values[:, :, first:end],
                attn_mask=mask[:, mask.shape[1] - (end - first) :],
                enable_gqa=grouped,
            )
        if attended.shape[0] != span.num_queries:
            out[rows] = attended[before : before + span.num_queries]

    def _mask(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        """(TILE, keys) of 0 or minus infinity, added to the scores of a tile's queries and the keys up to its end. All
        layers and tiles share it; earlier tiles use fewer keys. Not of bools, which torch would convert in each call.
        """
        if (window, dtype) not in self._masks:
            queries = torch.arange(TILE)[:, None]
            positions = torch.arange(-(-self._longest // TILE) * TILE)[None]
            positions -= positions.shape[1] - TILE
            hidden = positions > queries
            if window:
                hidden |= positions <= queries - window
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
            self._masks[window, dtype] = mask.to(self.pool.kv.device)
        return self._masks[window, dtype]


def _span_of(row: ForwardRow, start: int, pool: KvPool) -> tuple[_Span, np.ndarray, np.ndarray]:
    """The row, its tokens' positions and pool places. `start`: index of its first token in the batch."""
    count, size = row.num_tokens, pool.tokens_per_block
    begin, end = row.num_computed, row.num_computed + count
    blocks = np.asarray(row.blocks[: -(-end // size)], np.int64)
    positions = np.arange(begin, end)
    places = blocks[positions // size] * pool.rows_per_block + positions % size
    found = torch.from_numpy(blocks).to(pool.kv.device)
    return _Span(start, count, end, found, row.in_prefill, row.num_logits), positions, places


def _whole_tiles(run: torch.Tensor, before: int = 0) -> torch.Tensor:
    """Pads (tokens, heads, dim) with `before` zeros in front, and zeros up to a tile's end: the bits of matrix kernels
    depend on the number and place of queries and keys.
    """
    after = -(before + len(run)) % TILE
    return pad(run, (0, 0, 0, 0, before, after)) if before or after else run


def _to_tiles_end(run: torch.Tensor, context: int) -> torch.Tensor:
    """The first `context` keys or values, with zeros up to a tile's end: the pool may hold infinities there. Changes
    `run`, a copy of whole blocks.
    """
    end = -(-context // TILE) * TILE
    if end > len(run):
        return _whole_tiles(run[:context])
    run[context:end] = 0  # another copy would take a sixth of a short tile's time
    return run[:end]


def _heads_first(run: torch.Tensor) -> torch.Tensor:
    """A view (1, heads, tokens, dim)."""
    return run.transpose(0, 1)[None]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: StepLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query (1, heads, tokens, dim) -> (1, tokens, heads, dim)."""
    if unknown := {name for name, given in others.items() if given is not None} - _HARMLESS:
        raise NotImplementedError(
            f"attention options {sorted(unknown)} are not served by the embedded engine"
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = paged.attend(
        LayerAttention(
            layer, query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap
        ),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
    )
    return out[None], None
