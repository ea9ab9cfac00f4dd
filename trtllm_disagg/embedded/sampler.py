"""From logits to tokens. Every draw is a function of (seed, choice, position) and the logits row, of nothing else.

So a request gives the same tokens alone, in any batch, and whichever process made its first token.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from trtllm_disagg.embedded.messages import LogprobEntry
from trtllm_disagg.embedded.sequence import Sequence

_KEY = struct.Struct("<QIQ")


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
    """Penalties, forbidden tokens and min_tokens; the raw logits stay as they are."""
    touched = [i for i, s in enumerate(sequences) if _forbidden(s) or s.sampling.has_penalties]
    if not touched:
        return raw
    scores = raw.clone()
    for i in touched:
        sequence = sequences[i]
        if sequence.sampling.has_penalties:
            _penalise(scores[i], sequence)
        if forbidden := _forbidden(sequence):
            scores[i, forbidden] = float("-inf")
    return scores


def _forbidden(sequence: Sequence) -> list[int]:
    spec = sequence.sampling
    forbidden = list(spec.bad_token_ids)
    if sequence.num_output < spec.min_tokens:
        forbidden += spec.end_ids
        forbidden += [word[0] for word in spec.stop_words if len(word) == 1]
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
        output, counts = torch.tensor(sequence.output, device=scores.device).unique(return_counts=True)
        scores[output] -= spec.presence_penalty + spec.frequency_penalty * counts


def _draw(scores: torch.Tensor, sequences: Seq[Sequence]) -> list[int]:
    """Temperature, then top-k, top-p, min-p over the sorted distribution, then the inverse of its sum at u."""
    column = scores.new_tensor
    specs = [s.sampling for s in sequences]
    probs = torch.softmax(scores / column([s.temperature for s in specs])[:, None], -1)
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)[None]
    keep = rank < torch.tensor([s.top_k or probs.shape[1] for s in specs], device=probs.device)[:, None]
    probs = probs * keep
    before = probs.cumsum(-1) - probs
    keep = before < column([s.top_p for s in specs])[:, None] * probs.sum(-1, keepdim=True)
    keep &= probs >= column([s.min_p for s in specs])[:, None] * probs[:, :1]
    keep[:, 0] = True
    # Double precision: a float32 sum over a large vocabulary would blur the thresholds.
    total = (probs * keep).double().cumsum(-1)
    u = [uniform(s.seed, s.index, len(s.tokens)) for s in sequences]
    threshold = torch.tensor(u, dtype=torch.float64, device=probs.device)[:, None] * total[:, -1:]
    picked = torch.searchsorted(total, threshold, right=True).clamp_(max=probs.shape[1] - 1)
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
