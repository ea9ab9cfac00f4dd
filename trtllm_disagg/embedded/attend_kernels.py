"""Attention of one query over the paged pool, each row by itself (numba, CPU); as in kernels.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_disagg.embedded.compiled import compiled
from trtllm_disagg.embedded.head_sums import add_weighted, scores_of
from trtllm_disagg.embedded.kernels import load, pack
from trtllm_disagg.embedded.lanes import exp, exponentials, on_its_own

_ONE, _ZERO, _TWO = np.float32(1.0), np.float32(0.0), np.float32(2.0)
#: Beyond it tanh is one, in float32.
_FLAT = np.float32(10.0)


@compiled(inline="always")
def _tanh(x: Any) -> Any:
    e = exp(_TWO * min(max(x, -_FLAT), _FLAT))
    return (e - _ONE) / (e + _ONE)


@compiled()
def attend_rows(
    q: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    starts: Any,
    block: Any,
    scale: Any,
    softcap: Any,
    scores: Any,
    out: Any,
) -> None:
    """One query a row: q and out (rows, Hq, D), keys and values (slots, H, D), tables (rows, blocks) of block ids.

    Row r sees positions starts[r] to contexts[r]. A softcap above zero bounds the scores. `scores` is scratch
    (Hq, longest context), float32.
    """
    rows, num_heads, dim = q.shape
    query = np.empty((num_heads, dim), np.float32)
    summed = np.empty((num_heads, dim), np.float32)
    for r in range(rows):
        attend_heads(
            q[r],
            0,
            keys.shape[1],
            keys,
            values,
            tables[r],
            starts[r],
            contexts[r],
            block,
            scale,
            softcap,
            scores,
            query,
            summed,
            out[r],
        )


@compiled()
def attend_heads(
    q: Any,
    first_head: Any,
    last_head: Any,
    keys: Any,
    values: Any,
    table: Any,
    start: Any,
    context: Any,
    block: Any,
    scale: Any,
    softcap: Any,
    scores: Any,
    query: Any,
    summed: Any,
    out: Any,
) -> None:
    """One row, some KV heads and their query heads: q and out (Hq, D); scores (Hq, longest context), query and
    summed (Hq, D) are scratch.
    """
    on_its_own()
    num_heads, dim = query.shape
    group = num_heads // keys.shape[1]
    lower, upper = first_head * group, last_head * group
    factors = np.empty(num_heads, np.float32)
    for h in range(lower, upper):
        row, asked, sums = q[h], query[h], summed[h]
        for d in range(dim):
            asked[d] = load(row[d]) * scale
            sums[d] = _ZERO
    i, position = 0, start
    while position < context:
        slot, count = _run(table, position, context, block)
        scores_of(query, keys, slot, first_head, last_head, count, scores, i)
        i += count
        position += count
    for h in range(lower, upper):
        if softcap > _ZERO:
            capped = scores[h]
            for t in range(i):
                capped[t] = softcap * _tanh(capped[t] / softcap)
        factors[h] = _ONE / exponentials(scores[h], i)
    i, position = 0, start
    while position < context:
        slot, count = _run(table, position, context, block)
        add_weighted(scores, i, values, slot, first_head, last_head, count, summed)
        i += count
        position += count
    for h in range(lower, upper):
        factor, sums, target = factors[h], summed[h], out[h]
        for d in range(dim):
            target[d] = pack(sums[d] * factor, target[d])


@compiled(inline="always")
def _run(table: Any, position: Any, context: Any, block: Any) -> Any:
    """The slots from this position to the end of its block or of the context: (first, count)."""
    inside = position % block
    return table[position // block] * block + inside, min(block - inside, context - position)
