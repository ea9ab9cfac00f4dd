"""Does the token that was just appended end the answer, and does the client get to see it?"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_disagg.embedded.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Verdict:
    emit: bool = True
    #: Earlier tokens to take back: the start of a stop word that is complete only now.
    trim: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


GO_ON = Verdict()
LENGTH = Verdict(finish_reason="length")
END = Verdict(emit=False, finish_reason="stop")
#: With ignore_eos; but a grammar goes no further.
SHOWN_END = Verdict(finish_reason="stop")


def judge(sequence: Sequence) -> Verdict:
    """End tokens first, then stop words, then max_tokens; none of the first two before min_tokens, unless
    a grammar has nothing else to offer.
    """
    spec, guide = sequence.sampling, sequence.guide
    if sequence.num_output > spec.min_tokens or (guide is not None and guide.exhausted):
        if sequence.tokens[-1] in spec.end_ids:
            return END
        for word, reason in zip(spec.stop_words, spec.stop_reasons, strict=True):
            if sequence.num_output >= len(word) and tuple(sequence.tokens[-len(word) :]) == word:
                if spec.include_stop:
                    return Verdict(finish_reason="stop", stop_reason=reason)
                return Verdict(emit=False, trim=len(word) - 1, finish_reason="stop", stop_reason=reason)
    if guide is not None and sequence.tokens[-1] in guide.end_ids:
        return SHOWN_END
    if sequence.num_output >= spec.max_tokens:
        return LENGTH
    return GO_ON
