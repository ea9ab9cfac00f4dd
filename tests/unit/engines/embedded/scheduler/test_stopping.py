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


STOP_6: dict[str, Any] = {"stop_words": ((6,),), "stop_reasons": (6,)}


@pytest.mark.parametrize(
    ("output", "spec", "expected"),
    [
        ([5, EOS], {}, Verdict(emit=False, finish_reason="stop")),
        # Only the newest token counts.
        ([EOS, 5], {}, GO_ON),
        ([5, 6], STOP_6, Verdict(emit=False, finish_reason="stop", stop_reason=6)),
        ([5, 6], STOP_6 | {"include_stop": True}, Verdict(finish_reason="stop", stop_reason=6)),
        # A stop word of several tokens trims its start.
        ([4, 5, 6], stops((5, 6)), Verdict(False, 1, "stop", "stop (5, 6)")),
        ([4, 5], stops((5, 6)), GO_ON),
        # It does not begin in the prompt.
        ([5], stops((9, 5)), GO_ON),
        ([9, 5], stops((9, 5)), Verdict(False, 1, "stop", "stop (9, 5)")),
        # The first one that matches is the reason.
        ([4, 5], stops((5,), (4, 5)), Verdict(False, 0, "stop", "stop (5,)")),
        ([4, 4], {"max_tokens": 3}, GO_ON),
        ([4, 4, 4], {"max_tokens": 3}, Verdict(finish_reason="length")),
        ([4, 4, EOS], {"max_tokens": 3}, Verdict(emit=False, finish_reason="stop")),
    ],
    ids=str,
)
def test_an_answer_ends_by_its_last_token(output: list[int], spec: dict[str, Any], expected: Verdict) -> None:
    assert verdict(output, **spec) == expected


@pytest.mark.parametrize("ending", [[EOS], [6], [5, 6]], ids=["end", "stop token", "stop word"])
def test_nothing_ends_an_answer_before_min_tokens_but_max_tokens(ending: list[int]) -> None:
    stop = stops((6,), (5, 6))
    filler = [4] * (3 - len(ending))
    assert verdict(filler + ending, **stop, min_tokens=3) == GO_ON
    assert verdict([4, *filler, *ending], **stop, min_tokens=3).finish_reason == "stop"
    assert verdict(filler + ending, **stop, min_tokens=3, max_tokens=3).finish_reason == "length"
