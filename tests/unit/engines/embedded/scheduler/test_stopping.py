"""When an answer ends, and what of its end the client sees."""

from __future__ import annotations

from typing import Any

import pytest

from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence, Verdict, judge

EOS = 1
GO_ON = Verdict()


def verdict(output: list[int], **spec: Any) -> Verdict:
    settings: dict[str, Any] = {"max_tokens": 10, "end_ids": (EOS,)} | spec
    prompt = [7, 8, 9]
    return judge(
        Sequence(1, 0, "context_and_generation", prompt + output, len(prompt), SamplingSpec(**settings), 0)
    )


def stops(*words: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"stop_words": words, "stop_reasons": tuple(f"stop {word}" for word in words), **more}


def test_an_end_token_ends_silently() -> None:
    assert verdict([5, EOS]) == Verdict(emit=False, finish_reason="stop", stop_reason=None)
    assert verdict([EOS, 5]) == GO_ON, "only the newest token counts"


def test_a_stop_token_is_not_returned_but_named() -> None:
    stop = {"stop_words": ((6,),), "stop_reasons": (6,)}
    assert verdict([5, 6], **stop) == Verdict(emit=False, finish_reason="stop", stop_reason=6)
    assert verdict([5, 6], **stop, include_stop=True) == Verdict(finish_reason="stop", stop_reason=6)


def test_stop_word_of_several_tokens_trims_its_start() -> None:
    found = verdict([4, 5, 6], **stops((5, 6)))
    assert found == Verdict(emit=False, trim=1, finish_reason="stop", stop_reason="stop (5, 6)")
    assert verdict([4, 5], **stops((5, 6))) == GO_ON


def test_stop_word_does_not_match_prompt_tokens() -> None:
    assert verdict([5], **stops((9, 5))) == GO_ON
    assert verdict([9, 5], **stops((9, 5))).finish_reason == "stop"


def test_first_matching_stop_word_is_the_stop_reason() -> None:
    assert verdict([4, 5], **stops((5,), (4, 5))).stop_reason == "stop (5,)"


@pytest.mark.parametrize("ending", [[EOS], [6], [5, 6]], ids=["end", "stop token", "stop word"])
def test_nothing_ends_an_answer_before_min_tokens_but_max_tokens(ending: list[int]) -> None:
    stop = stops((6,), (5, 6))
    filler = [4] * (3 - len(ending))
    assert verdict(filler + ending, **stop, min_tokens=3) == GO_ON
    assert verdict([4, *filler, *ending], **stop, min_tokens=3).finish_reason == "stop"
    assert verdict(filler + ending, **stop, min_tokens=3, max_tokens=3).finish_reason == "length"


def test_the_last_allowed_token_is_returned() -> None:
    assert verdict([4, 4], max_tokens=3) == GO_ON
    assert verdict([4, 4, 4], max_tokens=3) == Verdict(finish_reason="length")


def test_stopping_at_the_last_allowed_token_is_a_stop() -> None:
    assert verdict([4, 4, EOS], max_tokens=3).finish_reason == "stop"
