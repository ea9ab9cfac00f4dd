"""SamplingParams.prompt_logprobs: of each position of the prompt, what the model thought of the token behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.conftest import Checkpoints
from tests.support.cores import Core
from trtllm_disagg.engines.embedded.core import build
from trtllm_disagg.engines.embedded.ipc.messages import LogprobEntry, SamplingSpec
from trtllm_disagg.engines.embedded.model import sampler
from trtllm_disagg.engines.embedded.model.rows import Sampled
from trtllm_disagg.engines.embedded.scheduler.scheduler import Row

#: Five tiles and a bit.
PROMPT = [2 + (i * 17 + i * i) % 250 for i in range(170)]
TOP = 3
ASKING = SamplingSpec(max_tokens=4, prompt_logprobs=TOP)
FAMILIES = [("llama", "auto"), ("gemma2", "auto"), ("mistral", "transformers")]
MakeCore = Callable[..., Core]


@pytest.fixture
def make_core(checkpoints: Checkpoints) -> Iterator[MakeCore]:
    made: list[Core] = []

    def make(family: str = "llama", **args: Any) -> Core:
        made.append(Core(checkpoints(family), **args))
        return made[-1]

    yield make
    for core in made:
        core.assert_idle()
        core.close()


def expected(core: Core, prompt: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> list[LogprobEntry]:
    """Each start of the prompt is a request of its own, of which the logits of the first token are kept."""
    tables: list[torch.Tensor] = []

    def keep(logits: torch.Tensor, sequences: Sequence[Any]) -> Any:
        tables.append(torch.log_softmax(logits[0], -1))
        return sampler.sample(logits, sequences)

    with monkeypatch.context() as patched:
        patched.setattr(build, "sample", keep)
        behind = [core.generate(prompt[:end], 1)[0] for end in range(1, len(prompt) + 1)]
    behind[:-1] = prompt[1:]
    return [_entry(table, token) for table, token in zip(tables, behind, strict=True)]


def _entry(table: torch.Tensor, token: int) -> LogprobEntry:
    order = table.argsort(descending=True, stable=True).tolist()
    shown = [token, *(each for each in order[:TOP] if each != token)]
    in_top = token in order[:TOP]
    return [(each, float(table[each]), order.index(each) + 1) for each in shown[: TOP if in_top else TOP + 1]]


def scores(core: Core, prompt: Sequence[int], **more: Any) -> list[LogprobEntry]:
    answer = core.run(core.add(prompt, sampling=ASKING, **more))
    assert answer.error is None
    return answer.prompt_logprobs


@pytest.mark.parametrize(("family", "forward"), FAMILIES, ids="-".join)
def test_prompt_logprobs_are_bitwise_those_of_each_prompt_prefix(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, family: str, forward: str
) -> None:
    core = make_core(family, embedded={"forward": forward})
    prompt = PROMPT[:70]
    assert scores(core, prompt) == expected(core, prompt, monkeypatch)


def test_prompt_logprobs_are_the_same_chunked_cached_and_batched(make_core: MakeCore) -> None:
    whole = scores(make_core(), PROMPT)
    assert len(whole) == len(PROMPT)
    core = make_core(max_num_tokens=64, enable_chunked_prefill=True)
    assert scores(core, PROMPT) == whole
    core.generate([*PROMPT, 7], 20)
    others = [core.add([9 + i, *PROMPT], 12) for i in range(2)]
    asked = [core.add(PROMPT, sampling=ASKING) for _ in range(2)]
    core.run(*others, *asked)
    assert [core.answers[each, 0].prompt_logprobs for each in asked] == [whole, whole]
    assert core.answers[asked[0], 0].cached_tokens == 0


def test_prompt_logprobs_of_each_choice_end_with_its_own_token(make_core: MakeCore) -> None:
    core = make_core()
    drawing = SamplingSpec(max_tokens=3, greedy=False, temperature=3.0, seed=1, prompt_logprobs=0)
    request = core.add(PROMPT[:40], sampling=drawing, choices=2)
    core.run(request)
    answers = [core.answers[request, index] for index in range(2)]
    assert answers[0].tokens[0] != answers[1].tokens[0]
    for answer in answers:
        behind = [*PROMPT[1:40], answer.tokens[0]]
        assert [[token for token, _, _ in entry] for entry in answer.prompt_logprobs] == [
            [token] for token in behind
        ]


def test_a_request_that_was_paused_in_its_prompt_has_all_of_them(make_core: MakeCore) -> None:
    """Six blocks for three growing requests: the last one admitted is paused, and goes on with what is in the cache."""
    whole = scores(make_core(), PROMPT[:30])
    core = make_core(
        kv_cache_config={"max_tokens": 8 * 16, "tokens_per_block": 16},
        scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
        embedded={"swap_tokens": 0},
        max_num_tokens=32,
        enable_chunked_prefill=True,
    )
    long = SamplingSpec(max_tokens=50, prompt_logprobs=TOP)
    asked = [core.add(PROMPT[:30], sampling=long) for _ in range(3)]
    core.run(*asked)
    assert core.engine.scheduler.counts.paused > 0
    assert [core.answers[each, 0].prompt_logprobs for each in asked] == [whole] * 3


@pytest.mark.parametrize("max_num_tokens", [1024, 320])
def test_a_step_has_logits_of_a_bounded_number_of_tokens(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, max_num_tokens: int
) -> None:
    """The logits of many tokens, all at once, may not fit into the memory."""
    prompt = PROMPT[: 5 * 32]
    whole = scores(make_core(), prompt)
    core = make_core(max_num_tokens=max_num_tokens)
    sizes: list[int] = []
    run = core.engine.model.run

    def counted(rows: list[Row]) -> list[Sampled]:
        sizes.append(sum(row.num_logits for row in rows))
        return run(rows)

    monkeypatch.setattr(core.engine.model, "run", counted)
    asked = [core.add(prompt, sampling=ASKING) for _ in range(2)]
    core.run(*asked)
    assert [core.answers[each, 0].prompt_logprobs for each in asked] == [whole] * 2
    assert max(sizes) == 8 * 32


def test_context_only_prefill_returns_prompt_logprobs(make_core: MakeCore) -> None:
    whole = scores(make_core(), PROMPT)
    core = make_core(cache_transceiver_config={"backend": "SHARED_MEMORY"})
    answer = core.run(
        core.add(
            PROMPT, sampling=SamplingSpec(max_tokens=1, prompt_logprobs=TOP), request_type="context_only"
        )
    )
    assert answer.handoff is not None
    assert answer.prompt_logprobs == whole
    decoded = core.run(core.add_decode(PROMPT, answer.handoff))
    assert decoded.prompt_logprobs == []
