"""A request with a stream interval of n gets all its tokens, n at a time."""

from __future__ import annotations

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec, TokenOutput

PROMPT = list(range(5, 45))


def said_until_the_end(core: Core, request_id: int) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    while not core.answers[request_id, 0].done:
        outputs += core.step()
    return outputs


@pytest.mark.parametrize(
    ("interval", "counts"),
    [(1, [1] * 10), (2, [1, 1, 2, 2, 2, 2]), (4, [1, 3, 4, 2]), (10, [1, 9]), (99, [1, 9])],
)
def test_tokens_arrive_in_parts_of_the_stream_interval(
    checkpoints: Checkpoints, interval: int, counts: list[int]
) -> None:
    core = Core(checkpoints())
    usual = core.generate(PROMPT, 10)
    request_id = core.add(PROMPT, stream_interval=interval, sampling=SamplingSpec(max_tokens=10, logprobs=0))

    outputs = said_until_the_end(core, request_id)

    assert [len(output.token_ids) for output in outputs] == counts
    assert [output.num_steps for output in outputs] == counts
    assert [len(output.logprobs or ()) for output in outputs] == counts
    assert core.answers[request_id, 0].tokens == usual
    core.close()


def test_cancel_delivers_the_tokens_that_were_kept_back(checkpoints: Checkpoints) -> None:
    core = Core(checkpoints())
    usual = core.generate(PROMPT, 10)
    request_id = core.add(PROMPT, 300, stream_interval=8)
    for _ in range(5):
        core.step()
    assert core.answers[request_id, 0].tokens == usual[:1]

    core.engine.abort(request_id)
    core.step()

    answer = core.answers[request_id, 0]
    assert (answer.tokens, answer.finish_reason) == (usual[:5], "cancelled")
    core.close()


def test_a_stop_word_that_began_in_an_earlier_part_is_cut(checkpoints: Checkpoints) -> None:
    core = Core(checkpoints())
    usual = core.generate(PROMPT, 10)
    word = tuple(usual[3:6])  # the first of them comes with the part that ends at four
    sampling = SamplingSpec(max_tokens=10, stop_words=(word,), stop_reasons=("word",))
    request_id = core.add(PROMPT, stream_interval=4, sampling=sampling)

    said_until_the_end(core, request_id)

    assert core.answers[request_id, 0].tokens == usual[:3]
    core.close()
