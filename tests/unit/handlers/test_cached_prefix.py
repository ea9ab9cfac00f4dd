"""The index of what is in the engine's cache, after any events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.sinks import IndexListener, events_for
from trtllm_disagg.handlers.cached_prefix import CachedPrefix

BLOCK = 2
#: Tokens in an engine's block.
SIZE = 32

_Place = tuple[int | None, tuple[int, ...], str | None]

#: A tree of blocks: (parent, its two tokens, salt of a first block).
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove"]),
        st.integers(0, 50),
        st.integers(0, 3),
        st.sampled_from([None, "s"]),
    ),
    max_size=40,
)


@given(_STEPS, st.lists(st.integers(0, 1), max_size=9), st.sampled_from([None, "s"]))
def test_cached_prefix_index_matches_a_model_after_any_events(
    steps: list[tuple[str, int, int, str | None]], tail: list[int], salt: str | None
) -> None:
    index = CachedPrefix(BLOCK)
    model: dict[int, _Place] = {}
    counter = 0
    for what, pick, content, root in steps:
        known = sorted(model)
        if what == "remove":
            if known:
                gone = known[pick % len(known)]
                del model[gone]
                index.publish_removed([gone])
            continue
        parent = known[pick % len(known)] if known and pick % 3 else None
        tokens = [content % 2, content // 2]
        place = (parent, tuple(tokens), None if parent is not None else root)
        if place in model.values():
            continue  # an engine has each block once
        counter += 1
        model[counter] = place
        index.publish_stored(tokens, [BLOCK], [counter], parent, cache_salt=root if parent is None else None)
    assert len(index) == len(model)

    expected, before = 0, None
    by_place = {place: number for number, place in model.items()}
    for at in range(0, len(tail) - BLOCK + 1, BLOCK):
        number = by_place.get((before, tuple(tail[at : at + BLOCK]), salt if before is None else None))
        if number is None:
            break
        before, expected = number, expected + BLOCK
    if tail:
        assert index.num_cached(tail, salt) == min(expected, len(tail) - 1)


def test_the_last_token_is_always_computed() -> None:
    index = CachedPrefix(BLOCK)
    index.publish_stored([1, 2, 3, 4], [2, 2], [7, 8])
    assert [index.num_cached([1, 2, 3, 4, 5][:count]) for count in range(1, 6)] == [0, 1, 2, 3, 4]


def test_blocks_of_an_image_and_all_behind_them_never_count_as_cached() -> None:
    index = CachedPrefix(BLOCK)
    images = [None, {"mm_objects": [{"mm_hash": 9, "offsets": []}]}, None]
    index.publish_stored([1, 2, 5, 5, 3, 4], [2, 2, 2], [7, 8, 9], block_mm_infos=images)
    index.publish_stored([6, 6], [2], [10], 8)
    assert [index.num_cached([1, 2, 5, 5, *last, 0]) for last in ([3, 4], [6, 6])] == [2, 2]
    index.publish_removed([8, 7, 9, 10])
    assert len(index) == 0


def test_cached_prefix_index_predicts_the_engines_cached_tokens(checkpoints: Checkpoints) -> None:
    """Of every prompt, before it is asked: what the engine then says it had."""
    kv = {"max_tokens": 12 * SIZE, "event_buffer_max_size": 10_000, "enable_partial_reuse": False}
    core = Core(checkpoints(), kv_cache_config=kv)
    index = CachedPrefix(SIZE)
    events = events_for(IndexListener(index), SIZE)
    told = 0
    stems = [[7 + stem] * (3 * SIZE) for stem in range(4)]
    try:
        for turn in range(24):  # more than the pool holds, so some are evicted
            prompt = [*stems[turn % 4], *range(turn % 3 * SIZE), 5]
            expected = index.num_cached(prompt)
            request = core.add(prompt, 2)
            assert core.run(request).cached_tokens == expected
            events.receive(core.events[told:])
            told = len(core.events)
        assert len(index) > 0
    finally:
        core.close()
