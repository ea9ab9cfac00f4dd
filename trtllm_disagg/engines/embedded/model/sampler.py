"""Draws tokens from logits. A draw depends only on (seed, position) and its logits row.

So a request gives the same tokens alone, in any batch, and in any process.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from trtllm_disagg.engines.embedded.ipc.messages import LogprobEntry, SamplingSpec
from trtllm_disagg.engines.embedded.model.rows import Sampled

if TYPE_CHECKING:
    from trtllm_disagg.engines.embedded.model.guided_decoding import Guide


class SampledSequence(Protocol):
    """A draw's inputs besides the logits."""

    sampling: SamplingSpec
    seed: int
    #: The grammar's state, if any.
    guide: Guide | None
    #: Prompt and output tokens.
    tokens: list[int]

    @property
    def num_output(self) -> int: ...


_KEY = struct.Struct("<QIQ")
#: Lower temperatures are greedy.
_COLDEST = 1e-6
#: Larger vocabularies are not sorted for top-p, except on CUDA, where sorting is cheap.
_SMALL_VOCABULARY = 8192
#: Number of score classes for a larger vocabulary, in all and per factor of e in probability.
_CLASSES, _CLASSES_PER_E = 2048, 64
#: Scores per pass, so that temporaries stay in the cache.
_AT_A_TIME = 2**18


def uniform(seed: int, position: int) -> float:
    """A 53-bit number in [0, 1): blake2b over (seed, 0, position)."""
    digest = hashlib.blake2b(_KEY.pack(seed, 0, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(scores: torch.Tensor, sequences: Seq[SampledSequence]) -> list[int]:
    """Draw one token from each row of `scores` (rows, vocabulary), float32: temperature, min-p, top-k, top-p, then the
    inverse of the running sum at u. Each row is independent of the others.

    Sorting a large vocabulary costs more than a step of a small model. So top-k and top-p become a lowest kept score,
    min-p is one comparison, and the draw runs in the vocabulary's order.
    """
    count = len(sequences) if scores.is_cuda else max(1, _AT_A_TIME // scores.shape[1])
    return [
        token
        for start in range(0, len(sequences), count)
        for token in _draw(scores[start : start + count], sequences[start : start + count])
    ]


def _draw(scores: torch.Tensor, sequences: Seq[SampledSequence]) -> list[int]:
    """In double precision, since float32 would lose the tail of a large vocabulary."""
    specs = [s.sampling for s in sequences]
    # Relative to the maximum, so that a tiny temperature gives minus infinity and no NaN.
    coldness = _column([max(s.temperature, _COLDEST) for s in specs], scores)
    cooled = (scores - scores.amax(-1, keepdim=True)) / coldness
    probs = torch.softmax(cooled, -1)
    # min-p first, as in TensorRT-LLM: top-p is a share of its rest. Other rows keep their bits.
    if floored := [i for i, s in enumerate(specs) if s.min_p]:
        rows = probs[floored]
        rows *= rows >= _column([specs[i].min_p for i in floored], scores) * rows.amax(-1, keepdim=True)
        probs[floored] = rows / rows.sum(-1, keepdim=True)
    limited = [i for i, s in enumerate(specs) if 0 < s.top_k < scores.shape[1] or s.top_p < 1.0]
    kept = _within_limits(scores, cooled, probs, specs, limited) if limited else probs
    total = kept.cumsum(-1)
    whole = total[:, -1:].contiguous()
    u = _column([uniform(s.seed, len(s.tokens)) for s in sequences], scores)
    picked = torch.searchsorted(total, u * whole, right=True)
    # u * whole may round up to the whole, which the last kept token's sum reaches.
    last = torch.searchsorted(total, whole)
    tokens: list[int] = torch.minimum(picked, last)[:, 0].clamp(max=scores.shape[1] - 1).tolist()
    return tokens


def _column(values: Seq[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _within_limits(
    scores: torch.Tensor,
    cooled: torch.Tensor,
    probs: torch.Tensor,
    specs: Seq[SamplingSpec],
    limited: list[int],
) -> torch.Tensor:
    """`probs` with zeros where top-k and top-p drop tokens, in the rows `limited`."""
    limits: dict[int, _Limit] = {}
    is_small = scores.is_cuda or scores.shape[1] <= _SMALL_VOCABULARY
    if ranked := [i for i in limited if is_small or specs[i].top_k > 0]:
        found = _limits_by_rank(_rows(scores, ranked), _rows(probs, ranked), [specs[i] for i in ranked])
        limits |= zip(ranked, found, strict=True)
    for i in limited:
        if i not in limits:
            limits[i] = _nucleus(scores[i], cooled[i], probs[i], specs[i].top_p)
    within = _first(
        _rows(scores, limited),
        torch.tensor([[limits[i].lowest] for i in limited], dtype=scores.dtype, device=scores.device),
        torch.tensor([[limits[i].count] for i in limited], device=scores.device),
    )
    if len(limited) == len(specs):
        return probs * within
    kept = probs.clone()
    kept[limited] *= within
    return kept


def _rows(table: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return table if len(rows) == len(table) else table[rows]


@dataclass(frozen=True, slots=True)
class _Limit:
    """Number of kept tokens of a row, and their lowest score."""

    lowest: float
    count: int


def _limits_by_rank(scores: torch.Tensor, probs: torch.Tensor, specs: Seq[SamplingSpec]) -> list[_Limit]:
    """Each row's limit, found among the best scores: the largest top-k of them, or all if a row has none."""
    vocabulary = scores.shape[1]
    ranks = [s.top_k if 0 < s.top_k < vocabulary else vocabulary for s in specs]
    best = max(ranks)
    values, indices = scores.topk(best, dim=-1)
    top_k = torch.tensor(ranks, device=scores.device)[:, None]
    ordered = probs.gather(1, indices) * (torch.arange(best, device=scores.device) < top_k)
    total = ordered.cumsum(-1)
    # top-p is a share of top-k's rest.
    wanted = _column([s.top_p for s in specs], scores) * total[:, -1:]
    nucleus = 1 + (total[:, :-1] < wanted).sum(-1, keepdim=True)
    everything = torch.tensor([[s.top_p >= 1.0] for s in specs], device=scores.device)
    counts = torch.where(everything, top_k, torch.minimum(nucleus, top_k))
    lowest = values.gather(1, counts - 1)
    return [_Limit(*limit) for limit in zip(lowest[:, 0].tolist(), counts[:, 0].tolist(), strict=True)]


def _nucleus(scores: torch.Tensor, cooled: torch.Tensor, probs: torch.Tensor, top_p: float) -> _Limit:
    """top-p of one row without a sort: finds the class that reaches the mass, then searches in it."""
    # Clamped again, so that even rows of NaN get a token.
    classes = (cooled * -_CLASSES_PER_E).clamp_(max=_CLASSES - 1).to(torch.int32).clamp_(min=0)
    reached = torch.bincount(classes, weights=probs, minlength=_CLASSES).cumsum(0)
    # The sum of all may round to less than top_p.
    last = min(int((reached < top_p).sum()), int(classes.max()))
    members = (classes == last).nonzero()[:, 0]
    values, order = scores[members].sort(descending=True)
    before = reached[last - 1] if last else 0.0
    inside = 1 + int((before + probs[members][order].cumsum(0)[:-1] < top_p).sum())
    return _Limit(values[inside - 1].item(), int((classes < last).sum()) + inside)


def _first(scores: torch.Tensor, lowest: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """True for each row's `counts` highest scores, down to `lowest`; ties go to the first."""
    within = scores >= lowest
    surplus = within.sum(-1, keepdim=True) - counts
    if surplus.any():
        ties = scores == lowest
        within &= ~ties | (ties.cumsum(-1) <= ties.sum(-1, keepdim=True) - surplus)
    return within


def sample(logits: torch.Tensor, sequences: Seq[SampledSequence]) -> list[Sampled]:
    """One token per row of `logits` (rows, vocabulary), in the model's dtype."""
    raw = logits.float()
    scores = _adjusted(raw, sequences)
    tokens: list[int] = scores.argmax(-1).tolist()
    drawn = [i for i, s in enumerate(sequences) if not s.sampling.greedy]
    if drawn:
        for i, token in zip(drawn, draw(scores[drawn], [sequences[i] for i in drawn]), strict=True):
            tokens[i] = token
    entries = _logprobs(raw, tokens, sequences)
    return [Sampled(token, entry) for token, entry in zip(tokens, entries, strict=True)]


def _adjusted(raw: torch.Tensor, sequences: Seq[SampledSequence]) -> torch.Tensor:
    """A copy of the logits with penalties, forbidden tokens, min_tokens and grammars."""
    touched = [i for i, s in enumerate(sequences) if s.guide or _forbidden(s) or s.sampling.has_penalties]
    if not touched:
        return raw
    scores = raw.clone()
    for i in touched:
        sequence = sequences[i]
        if sequence.sampling.has_penalties:
            _penalise(scores[i], sequence)
        _forbid(scores[i], sequence)
    return scores


def _forbid(scores: torch.Tensor, sequence: SampledSequence) -> None:
    """A grammar that leaves nothing else outranks min_tokens and bad tokens."""
    # A tokenizer may know more tokens than the model.
    forbidden = [t for t in _forbidden(sequence) if t < scores.shape[0]]
    if sequence.guide is None:
        scores[forbidden] = float("-inf")
        return
    barred = torch.from_numpy(sequence.guide.barred)
    if forbidden:
        both = barred.clone()
        both[forbidden] = True
        barred = barred if both.all() else both
    scores.masked_fill_(barred.to(scores.device), float("-inf"))


def _forbidden(sequence: SampledSequence) -> list[int]:
    spec = sequence.sampling
    forbidden = list(spec.bad_token_ids)
    if sequence.num_output < spec.min_tokens:
        forbidden += spec.end_ids
        forbidden += [word[0] for word in spec.stop_words if len(word) == 1]
        forbidden += sequence.guide.allowed_ends if sequence.guide is not None else ()
    return forbidden


def _penalise(scores: torch.Tensor, sequence: SampledSequence) -> None:
    """As in TensorRT-LLM, all penalties count prompt and output; presence and frequency skip the prompt's first
    `prompt_ignore_length` tokens. None counts the positions of images: their ids are above the vocabulary.
    """
    spec, vocabulary = sequence.sampling, scores.shape[0]
    if spec.repetition_penalty != 1.0:
        known = [token for token in sorted(set(sequence.tokens)) if token < vocabulary]
        seen = torch.tensor(known, dtype=torch.int64, device=scores.device)
        values = scores[seen]
        scores[seen] = torch.where(
            values > 0, values / spec.repetition_penalty, values * spec.repetition_penalty
        )
    if not (spec.presence_penalty or spec.frequency_penalty):
        return
    ignored = min(spec.prompt_ignore_length, len(sequence.tokens) - sequence.num_output)
    every = Counter(sequence.tokens[ignored:])
    if counts := {token: count for token, count in every.items() if token < vocabulary}:
        counted = torch.tensor(list(counts), device=scores.device)
        times = torch.tensor(list(counts.values()), device=scores.device)
        scores[counted] -= spec.presence_penalty + spec.frequency_penalty * times


def _logprobs(
    raw: torch.Tensor, tokens: Seq[int], sequences: Seq[SampledSequence]
) -> list[LogprobEntry | None]:
    """Logprobs before temperature and penalties: the chosen token first, then the top ones."""
    wanted = [i for i, s in enumerate(sequences) if s.sampling.logprobs is not None]
    entries: list[LogprobEntry | None] = [None] * len(sequences)
    if not wanted:
        return entries
    table = torch.log_softmax(raw[wanted], -1)
    for row, i in zip(table, wanted, strict=True):
        entries[i] = _entry(row, tokens[i], sequences[i].sampling.logprobs or 0)
    return entries


def prompt_logprobs(logits: torch.Tensor, following: Seq[int], count: int) -> list[LogprobEntry]:
    """Logprobs of each row of `logits` (positions, vocabulary): the prompt's next token, then the top ones."""
    at_a_time = max(1, _AT_A_TIME // logits.shape[1])
    tables = (torch.log_softmax(part.float(), -1) for part in torch.split(logits, at_a_time))
    rows = (row for table in tables for row in table)
    return [_entry(row, token, count) for row, token in zip(rows, following, strict=True)]


def _entry(row: torch.Tensor, chosen: int, count: int) -> LogprobEntry:
    """`row`: logprobs of all tokens."""
    rank = int((row > row[chosen]).sum()) + 1
    entry: LogprobEntry = [(chosen, float(row[chosen]), rank)]
    top = row.topk(min(count, row.shape[0]))
    for position, (value, token) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True), 1):
        if token != chosen:
            entry.append((token, value, position))
    return entry[: count + 1]
