"""Attention of prompts has the formula's numbers, by torch and by the compiled kernel; the kernel's bits depend on
nothing but a token's numbers and its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.kv_cache.pool import KvPool
from trtllm_disagg.engines.embedded.model.attention import StepLayout
from trtllm_disagg.engines.embedded.model.layer_ops import LayerOps
from trtllm_disagg.engines.embedded.model.layers import LayerAttention
from trtllm_disagg.engines.embedded.model.rows import ForwardRow


def compiled() -> LayerOps:
    from trtllm_disagg.engines.embedded.model.compiled_ops import CompiledOps

    return CompiledOps()


ARITHMETIC: dict[str, Callable[[], LayerOps]] = {"torch": LayerOps} | (
    {"compiled": compiled} if this_cpu().compiles else {}
)
#: Of queries, of the pool, and the largest error.
DTYPES = [(torch.float32, torch.float32, 2e-5), (torch.float32, torch.bfloat16, 2e-5)] + (
    [(torch.bfloat16, torch.bfloat16, 3e-2)] if this_cpu().has_bfloat16 else []
)
only_compiled = pytest.mark.skipif(
    not this_cpu().compiles, reason="no kernels are compiled at this CPU level"
)
LAYER, LAYERS = 1, 2


@dataclass(frozen=True, kw_only=True)
class Heads:
    kv: int = 2
    group: int = 2
    dim: int = 16

    @property
    def query(self) -> int:
        return self.kv * self.group


HEADS = st.builds(
    Heads,
    kv=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7, 71]),
    dim=st.sampled_from([8, 16, 24, 64, 80]),
)


@dataclass
class Prompt:
    """Numbers of a prompt: key and value (tokens, kv heads, dim), and a query for each token."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of(cls, tokens: int, heads: Heads, seed: int = 0) -> Prompt:
        generator = torch.Generator().manual_seed(seed)

        def numbers(count: int) -> torch.Tensor:
            return torch.randn((tokens, count, heads.dim), generator=generator)

        return cls(numbers(heads.query), numbers(heads.kv), numbers(heads.kv))

    def to(self, query: torch.dtype, stored: torch.dtype) -> Prompt:
        return Prompt(self.query.to(query), self.key.to(stored), self.value.to(stored))

    def by_formula(self, how: LayerAttention) -> torch.Tensor:
        tokens, count, _ = self.query.shape
        group = count // self.key.shape[1]
        key, value = (each.double().repeat_interleave(group, 1) for each in (self.key, self.value))
        scores = torch.einsum("qhd,khd->hqk", self.query.double(), key) * how.scale
        if how.softcap:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        place, seen = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
        hidden = seen > place
        if how.window:
            hidden |= seen <= place - how.window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


@dataclass(frozen=True)
class Part:
    """The tokens `begin` to `end` of a prompt, computed in this step."""

    prompt: Prompt
    begin: int
    end: int


def attended(
    ops: LayerOps, parts: Sequence[Part], how: LayerAttention, size: int = 16, *, last_only: bool = False
) -> list[torch.Tensor]:
    """Answers for each part, all in one step over a pool with blocks of `size`; its other numbers are infinite."""
    _, kv_heads, dim = parts[0].prompt.key.shape
    lengths = [-(-part.end // size) for part in parts]
    order = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(1)).tolist()
    kv = torch.full((len(order), LAYERS, 2, size, kv_heads, dim), torch.inf, dtype=parts[0].prompt.key.dtype)
    rows = []
    for part, length in zip(parts, lengths, strict=True):
        blocks, order = order[:length], order[length:]
        for position in range(part.end):
            place = kv[blocks[position // size], LAYER, :, position % size]
            place[0], place[1] = part.prompt.key[position], part.prompt.value[position]
        rows.append(ForwardRow([7] * (part.end - part.begin), part.begin, blocks, True, 1))
    pool = KvPool(kv)
    layout = StepLayout(rows, pool, ops.decode_rows(rows, pool), ops.prefill_rows(rows, pool))
    query = torch.cat([part.prompt.query[part.begin : part.end] for part in parts])
    out = layout.attend_stored(how, query, last_only=last_only)
    return list(torch.split(out, [row.num_tokens for row in rows]))


@pytest.mark.parametrize("arithmetic", list(ARITHMETIC))
@pytest.mark.parametrize(("dtype", "stored", "tolerance"), DTYPES, ids=str)
@settings(max_examples=25)
@given(
    heads=HEADS,
    tokens=st.integers(1, 170),
    cached=st.floats(0, 1),
    window=st.none() | st.integers(1, 150),
    softcap=st.none() | st.floats(1, 50),
    size=st.sampled_from([1, 2, 16, 32, 128]),
)
def test_attention_of_a_prompt_is_that_of_the_formula(
    arithmetic: str,
    dtype: torch.dtype,
    stored: torch.dtype,
    tolerance: float,
    heads: Heads,
    tokens: int,
    cached: float,
    window: int | None,
    softcap: float | None,
    size: int,
) -> None:
    prompt = Prompt.of(tokens, heads).to(dtype, stored)
    how = LayerAttention(LAYER, heads.dim**-0.5, window, softcap)
    begin = min(int(cached * tokens), tokens - 1)
    (made,) = attended(ARITHMETIC[arithmetic](), [Part(prompt, begin, tokens)], how, size)
    torch.testing.assert_close(made.double(), prompt.by_formula(how)[begin:], atol=tolerance, rtol=tolerance)


@only_compiled
@settings(max_examples=40)
@given(
    heads=HEADS,
    tokens=st.integers(2, 170),
    cut=st.integers(1, 169),
    window=st.none() | st.integers(1, 150),
    sizes=st.tuples(*[st.sampled_from([1, 4, 16, 32, 128])] * 2),
)
def test_bits_of_a_prompt_are_the_same_in_parts_beside_others_and_in_other_blocks(
    heads: Heads, tokens: int, cut: int, window: int | None, sizes: tuple[int, int]
) -> None:
    assume(cut < tokens)
    prompt, other = Prompt.of(tokens, heads), Prompt.of(37, heads, seed=1)
    how = LayerAttention(LAYER, heads.dim**-0.5, window)
    one_size, another = sizes
    (whole,) = attended(compiled(), [Part(prompt, 0, tokens)], how, one_size)
    (first,) = attended(compiled(), [Part(prompt, 0, cut)], how, another)
    _, rest = attended(compiled(), [Part(other, 5, 37), Part(prompt, cut, tokens)], how, another)
    assert whole.equal(torch.cat((first, rest)))


@pytest.mark.parametrize("arithmetic", list(ARITHMETIC))
def test_the_last_layer_computes_the_tokens_with_logits(arithmetic: str) -> None:
    prompts = [Prompt.of(tokens, Heads(group=3), seed=tokens) for tokens in (1, 70, 131)]
    how, ops = LayerAttention(LAYER, 0.3), ARITHMETIC[arithmetic]()
    parts = [Part(prompt, 0, len(prompt.query)) for prompt in prompts]
    usual = attended(ops, parts, how)
    for each, whole in zip(attended(ops, parts, how, last_only=True), usual, strict=True):
        assert each[-1].equal(whole[-1])


@only_compiled
def test_a_key_that_is_no_number_shows_in_every_answer_that_sees_it_and_in_no_other() -> None:
    prompt = Prompt.of(40, Heads())
    prompt.key[21, 1, 3] = torch.nan
    (made,) = attended(compiled(), [Part(prompt, 0, 40)], LayerAttention(LAYER, 0.25))
    sees = (torch.arange(40)[:, None] >= 21) & (torch.arange(4)[None] // 2 == 1)
    assert made.isnan().any(-1).equal(sees)


@only_compiled
def test_heads_of_an_odd_size_are_left_to_torch() -> None:
    row, pool = ForwardRow([7], 0, [0], True, 1), KvPool(torch.zeros((1, LAYERS, 2, 16, 2, 5)))
    assert compiled().prefill_rows([row], pool) is None
    prompt, how = Prompt.of(9, Heads(dim=5)), LayerAttention(LAYER, 0.4)
    (made,) = attended(compiled(), [Part(prompt, 0, 9)], how)
    torch.testing.assert_close(made.double(), prompt.by_formula(how), atol=1e-5, rtol=1e-5)
