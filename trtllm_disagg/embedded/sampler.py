"""From logits to tokens. Every draw is a function of (seed, choice, position) and the logits row, of nothing else.

So a request gives the same tokens alone, in any batch, and whichever process made its first token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from trtllm_disagg.embedded.draw import draw
from trtllm_disagg.embedded.messages import LogprobEntry
from trtllm_disagg.embedded.sequence import Sequence


@dataclass(slots=True)
class Sampled:
    token: int
    logprobs: LogprobEntry | None


def sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
    """`logits` is (rows, vocabulary) in the model's dtype; one token for each row."""
    raw = logits.float()
    scores = _adjusted(raw, sequences)
    tokens = scores.argmax(-1).tolist()
    drawn = [i for i, s in enumerate(sequences) if not s.sampling.greedy]
    if drawn:
        for i, token in zip(drawn, draw(scores[drawn], [sequences[i] for i in drawn]), strict=True):
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
