"""Images in the engine core: answers, reuse, handoff, events, preemption."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.cores import Answer, Core
from tests.support.vision_models import MARKER, NUM_TOKENS, TOKENS, picture, reference_answer
from trtllm_disagg.engines.embedded.api.images import PromptWithImages, place_images
from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.engines.embedded.kv_cache import virtual_ids as kv_images

BLOCK = 32
TEXT = [2 + (i * 37 + i * i) % 250 for i in range(200)]
#: The first image is in two blocks, the second within one.
PROMPT = [*TEXT[:24], MARKER, *TEXT[24:60], MARKER, *TEXT[60:88]]
NEW = 8
SAMPLING = SamplingSpec(max_tokens=NEW, logprobs=5)
TRANSFER = {"cache_transceiver_config": {"backend": "SHARED_MEMORY"}}
#: A small pool whose paused requests are computed again.
SMALL = {
    "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    "embedded": {"swap_tokens": 0},
    "kv_cache_config": {"max_tokens": 10 * BLOCK, "enable_block_reuse": False},
}


Start = Callable[..., Core]


@pytest.fixture
def start(llava: Path) -> Iterator[Start]:
    """Starts a core. After the test every block is free."""
    started: list[Core] = []

    def begin(**args: Any) -> Core:
        started.append(Core(llava, **args))
        return started[-1]

    yield begin
    for core in started:
        core.assert_idle()
        core.close()


def placed(
    *images: Image.Image, prompt: Sequence[int] = PROMPT, uuids: Sequence[str] = ()
) -> PromptWithImages:
    inputs = {"multi_modal_data": {"image": list(images)}, "multi_modal_uuids": {"image": list(uuids)}}
    return place_images(list(prompt), inputs, None, "context_only", TOKENS)


def add(core: Core, given: PromptWithImages, **more: Any) -> int:
    more = {"sampling": SAMPLING} | more
    return core.add(given.virtual_ids, images=given.images, pixels=given.pixels, **more)


def ask(core: Core, *images: Image.Image) -> Answer:
    answer = core.run(add(core, placed(*images)))
    assert answer.error is None, answer.error
    return answer


def prefill(core: Core, given: PromptWithImages) -> Answer:
    sampling = SamplingSpec(max_tokens=1, logprobs=5)
    return core.run(add(core, given, sampling=sampling, request_type="context_only"))


def add_decode(core: Core, given: PromptWithImages, first: Answer) -> int:
    """Decode knows the expanded prompt, and the digests of the images."""
    assert first.handoff is not None, first
    rebuilt = place_images(given.token_ids, None, given.hashes, "generation_only", TOKENS)
    assert rebuilt.virtual_ids == given.virtual_ids
    more: dict[str, Any] = {"images": rebuilt.images, "sampling": SAMPLING, "logprobs": first.logprobs}
    return core.add_decode(rebuilt.virtual_ids, first.handoff, **more)


def said(answer: Answer) -> tuple[list[int], Any]:
    assert answer.error is None, answer.error
    return answer.tokens, answer.logprobs


@pytest.mark.parametrize("max_num_tokens", [32, 64, 1024])
def test_answers_equal_those_of_transformers_with_chunks_that_cut_images(
    start: Start, llava: Path, max_num_tokens: int
) -> None:
    images = [picture(1), picture(2, 20, 70)]
    expanded = placed(*images).token_ids
    answer = ask(start(max_num_tokens=max_num_tokens), *images)
    assert answer.tokens == reference_answer(llava, expanded, images, NEW)


def test_swapped_images_of_equal_size_give_the_bits_of_a_fresh_engine_in_any_order_and_batch(
    start: Start,
) -> None:
    pairs = [(picture(1), picture(2)), (picture(2), picture(1))]
    fresh = [said(ask(start(), *pair)) for pair in pairs]
    assert fresh[0][0] != fresh[1][0]
    core = start()
    for i in (0, 1, 1, 0):
        assert said(ask(core, *pairs[i])) == fresh[i]
    ids = [add(core, placed(*pair)) for pair in pairs]
    core.run(*ids)
    assert [said(core.answers[request, 0]) for request in ids] == fresh


def test_swapped_images_give_the_bits_of_one_engine_through_two_cold_or_warm_ones(start: Start) -> None:
    pairs = [placed(picture(1), picture(2)), placed(picture(2), picture(1))]
    alone = start()
    expected = [said(alone.run(add(alone, given))) for given in pairs]
    ends = start(**TRANSFER), start(**TRANSFER)
    for _ in ("cold", "warm"):
        ids = [add_decode(ends[1], given, prefill(ends[0], given)) for given in pairs]
        ends[1].run(*ids)
        assert [said(ends[1].answers[request, 0]) for request in ids] == expected


def test_the_same_image_is_reused_and_another_one_is_not_from_there_on(start: Start) -> None:
    core = start()
    assert ask(core, picture(1), picture(2)).cached_tokens == 0
    assert ask(core, picture(1), picture(2)).cached_tokens == 3 * BLOCK  # all that are full
    assert ask(core, picture(1), picture(3)).cached_tokens == 24 + NUM_TOKENS + 36
    assert ask(core, picture(3), picture(2)).cached_tokens == 24


def test_the_decode_engine_fetches_the_blocks_of_another_image(start: Start) -> None:
    ends = start(**TRANSFER), start(**TRANSFER)
    moved = []
    for given in (
        placed(picture(1), picture(2)),
        placed(picture(3), picture(2)),
        placed(picture(1), picture(2)),
    ):
        ends[1].run(add_decode(ends[1], given, prefill(ends[0], given)))
        moved.append(ends[1].stats[-1]["totals"]["kvBytesPulled"])
    first, second, third = moved[0], moved[1] - moved[0], moved[2] - moved[1]
    # Of a known prompt only the last block, which is not full, moves.
    assert second == first
    assert third == first // 4


def test_a_handoff_of_another_image_is_refused(start: Start) -> None:
    ends = start(**TRANSFER), start(**TRANSFER)
    first = prefill(ends[0], placed(picture(1), picture(2)))
    other = placed(picture(1), picture(3))
    answer = ends[1].run(add_decode(ends[1], other, first))
    assert answer.error == "the handoff belongs to another prompt"
    given = placed(picture(1), picture(2))
    ends[1].run(add_decode(ends[1], given, first))  # frees the lease


def test_images_with_colliding_virtual_ids_share_no_kv(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = said(ask(start(), picture(3), picture(2)))
    first = kv_images.FIRST_VIRTUAL
    monkeypatch.setattr(kv_images, "virtual_ids", lambda digest, count: [first + i for i in range(count)])
    core = start()
    ask(core, picture(1), picture(2))
    answer = ask(core, picture(3), picture(2))
    assert (said(answer), answer.cached_tokens) == (fresh, 24)


def test_events_have_the_image_token_and_the_images_names(start: Start) -> None:
    core = start()
    given = placed(picture(1), picture(2), uuids=["", "beef"])
    core.run(add(core, given))
    events = [event["data"] for event in core.events if event["data"]["type"] == "stored"]
    blocks = [block for event in events for block in event["blocks"]]
    tokens = [token["token_id"] for block in blocks for token in block["tokens"]]
    assert tokens[: len(given.token_ids)] == given.token_ids[: len(tokens)]
    name = given.images[0].digest.hex()
    assert [block.get("mm_keys") for block in blocks[:3]] == [
        [{"type": "mm_key", "hash": name, "start_offset": 0}],
        [{"type": "mm_key", "hash": name, "start_offset": 8}],
        [{"type": "mm_key", "hash": "beef", "start_offset": 0}],
    ]
    assert all("mm_keys" not in block for block in blocks[3:])


def test_paused_requests_compute_their_images_again(start: Start) -> None:
    pairs = [(picture(1), picture(2)), (picture(2), picture(1))]
    sampling = SamplingSpec(max_tokens=80)
    roomy, small = start(), start(**SMALL)
    expected = [roomy.run(add(roomy, placed(*pair), sampling=sampling)).tokens for pair in pairs]
    ids = [add(small, placed(*pair), sampling=sampling) for pair in pairs]
    small.run(*ids)
    assert small.engine.scheduler.counts.paused
    assert [small.answers[request, 0].tokens for request in ids] == expected


def test_a_decode_engine_that_gave_up_an_images_kv_fails_that_request(start: Start) -> None:
    given = [placed(picture(1), picture(2)), placed(picture(2), picture(1))]
    ends = start(**TRANSFER), start(**TRANSFER, **SMALL)
    longer = SamplingSpec(max_tokens=80)
    ids = []
    for each in given:
        first = prefill(ends[0], each)
        assert first.handoff is not None
        more: dict[str, Any] = {"images": each.images, "sampling": longer}
        ids.append(ends[1].add_decode(each.virtual_ids, first.handoff, **more))
    ends[1].run(*ids)
    lucky, lost = (ends[1].answers[request, 0] for request in ids)
    assert (len(lucky.tokens), lucky.error) == (80, None)
    assert lost.category == "Unavailable"
    assert "only the prefill engine has the images" in str(lost.error)


def test_an_image_that_the_tower_cannot_encode_fails_only_its_request(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start()
    tower: Any = core.engine.images._tower
    monkeypatch.setattr(tower, "encode", lambda image: 1 // 0)
    ids = add(core, placed(picture(1), picture(2))), core.add(TEXT[:20])
    core.run(*ids)
    assert "could not be encoded" in str(core.answers[ids[0], 0].error)
    assert core.answers[ids[1], 0].error is None
    monkeypatch.undo()
    ask(core, picture(1), picture(2))


def test_a_request_whose_images_wait_for_the_tower_can_be_cancelled(start: Start) -> None:
    core = start()
    ids = [add(core, placed(picture(i), picture(2)), choices=2) for i in (1, 3)]
    core.step()
    assert core.engine.num_active == 2
    core.engine.abort(ids[0])
    core.run(*ids)
    reasons = [[core.answers[request, i].finish_reason for i in range(2)] for request in ids]
    assert reasons == [["cancelled"] * 2, ["length"] * 2]


def test_one_image_is_encoded_between_two_steps(start: Start) -> None:
    core = start()
    core.add(TEXT[:20], 30)
    core.step()
    add(core, placed(picture(1), picture(2)))
    for number_left in (1, 0):
        assert core.step(), "a step without a token of the running request"
        assert len(core.engine.images) == number_left
    core.run(1, 2)


def test_the_vectors_of_images_are_freed_when_the_answer_ends(start: Start) -> None:
    core = start()
    request = add(core, placed(picture(1), picture(2)))
    while core.engine.images:
        core.step()
    (sequence,) = core.engine.scheduler.find(request)
    vectors = [weakref.ref(each) for each in sequence.vectors.values()]
    assert len(vectors) == 2
    del sequence
    core.run(request)
    gc.collect()
    assert [each() for each in vectors] == [None, None]


def test_penalties_pass_over_images(start: Start) -> None:
    spec = SamplingSpec(max_tokens=NEW, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)
    core = start()
    assert len(core.run(add(core, placed(picture(1), picture(2)), sampling=spec)).tokens) == NEW
