"""From logits to tokens. Every draw is a function of (seed, choice, position) and the logits row, of nothing else.

So a request gives the same tokens alone, in any batch, and whichever process made its first token.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from trtllm_disagg.embedded.messages import LogprobEntry
from trtllm_disagg.embedded.sequence import Sequence

_KEY = struct.Struct("<QIQ")
#: Colder than this is the same as greedy.
_COLDEST = 1e-6


@dataclass(slots=True)
class Sampled:
    token: int
    logprobs: LogprobEntry | None


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) from a counter, 53 bits: blake2b over (seed, choice, position)."""
    digest = hashlib.blake2b(_KEY.pack(seed, index, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
    """`logits` is (rows, vocabulary) in the model's dtype; one token for each row."""
    raw = logits.float()
    scores = _adjusted(raw, sequences)
    tokens = scores.argmax(-1).tolist()
    drawn = [i for i, s in enumerate(sequences) if not s.sampling.greedy]
    if drawn:
        for i, token in zip(drawn, _draw(scores[drawn], [sequences[i] for i in drawn]), strict=True):
            tokens[i] = token
    entries = _logprobs(raw, tokens, sequences)
    return [Sampled(token, entry) for token, entry in zip(tokens, entries, strict=True)]


def _adjusted(raw: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Penalties, forbidden tokens, min_tokens and grammars; the raw logits stay as they are."""
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


def _forbid(scores: torch.Tensor, sequence: Sequence) -> None:
    """Where a grammar leaves nothing else, it outranks min_tokens and bad tokens."""
    # A tokenizer may know more tokens than the model.
    forbidden = [t for t in _forbidden(sequence) if t < scores.shape[0]]
    if sequence.guide is None:
        scores[forbidden] = float("-inf")
        return
    barred = sequence.guide.barred
    if forbidden:
        both = barred.clone()
        both[forbidden] = True
        barred = barred if both.all() else both
    scores.masked_fill_(barred.to(scores.device), float("-inf"))


def _forbidden(sequence: Sequence) -> list[int]:
    spec = sequence.sampling
    forbidden = list(spec.bad_token_ids)
    if sequence.num_output < spec.min_tokens:
        forbidden += spec.end_ids
        forbidden += [word[0] for word in spec.stop_words if len(word) == 1]
        forbidden += sequence.guide.enders if sequence.guide is not None else ()
    return forbidden


def _penalise(scores: torch.Tensor, sequence: Sequence) -> None:
    """Repetition counts prompt and output, presence and frequency the output only (as vLLM does)."""
    spec = sequence.sampling
    if spec.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=scores.device)
        values = scores[seen]
        scores[seen] = torch.where(
            values > 0, values / spec.repetition_penalty, values * spec.repetition_penalty
        )
    if sequence.num_output and (spec.presence_penalty or spec.frequency_penalty):
        counts = Counter(sequence.output)
        output = torch.tensor(list(counts), device=scores.device)
        times = torch.tensor(list(counts.values()), device=scores.device)
        scores[output] -= spec.presence_penalty + spec.frequency_penalty * times


def _draw(scores: torch.Tensor, sequences: Seq[Sequence]) -> list[int]:
    """Temperature, then top-k, top-p, min-p over the sorted distribution, then the inverse of its sum at u.

    Sums are running sums, which are the same for a row whatever the other rows are, and in double precision: in
    float32 the tail of a large vocabulary would be lost.
    """
    specs = [s.sampling for s in sequences]

    def column(values: Seq[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=scores.device)[:, None]

    # From the maximum down, so that a tiny temperature gives minus infinity and not the difference of two.
    cooled = (scores - scores.amax(-1, keepdim=True)) / column([max(s.temperature, _COLDEST) for s in specs])
    probs, order = torch.softmax(cooled, -1).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)[None]
    probs *= rank < column([s.top_k or probs.shape[1] for s in specs])
    total = probs.cumsum(-1)
    keep = total - probs < column([s.top_p for s in specs]) * total[:, -1:]
    keep &= probs >= column([s.min_p for s in specs]) * probs[:, :1]
    keep[:, 0] = True
    total = (probs * keep).cumsum(-1)
    u = column([uniform(s.seed, s.index, len(s.tokens)) for s in sequences])
    picked = torch.searchsorted(total, u * total[:, -1:], right=True).clamp_(max=probs.shape[1] - 1)
    return [int(t) for t in order.gather(1, picked)[:, 0].tolist()]


def _logprobs(raw: torch.Tensor, tokens: Seq[int], sequences: Seq[Sequence]) -> list[LogprobEntry | None]:
    """Of the model's own distribution (before temperature and penalties): the chosen token, then the top ones."""
    wanted = [i for i, s in enumerate(sequences) if s.sampling.logprobs is not None]
    entries: list[LogprobEntry | None] = [None] * len(sequences)
    if not wanted:
        return entries
    table = torch.log_softmax(raw[wanted], -1)
    for row, i in zip(table, wanted, strict=True):
        count = sequences[i].sampling.logprobs or 0
        chosen = row[tokens[i]]
        rank = int((row > chosen).sum()) + 1
        entry: LogprobEntry = [(tokens[i], float(chosen), rank)]
        top = row.topk(min(count, row.shape[0]))
        for position, (value, token) in enumerate(
            zip(top.values.tolist(), top.indices.tolist(), strict=True), 1
        ):
            if token != tokens[i]:
                entry.append((token, value, position))
        entries[i] = entry[: count + 1]
    return entries
