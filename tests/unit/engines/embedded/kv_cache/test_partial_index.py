"""The block with the longest common start is found, whatever was added and removed before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trtllm_disagg.engines.embedded.kv_cache.block_manager import Found, PartialIndex

SIZE = 4
PARENTS = [b"one", b"two"]
content = st.tuples(*[st.integers(0, 2)] * SIZE)
place = st.tuples(st.sampled_from(PARENTS), content)


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(
    changes=st.lists(st.tuples(st.booleans(), place), max_size=40),
    wanted=st.lists(
        st.tuples(st.sampled_from(PARENTS), st.lists(st.integers(0, 2), max_size=SIZE)), max_size=8
    ),
)
def test_partial_index_matches_a_linear_search(
    changes: list[tuple[bool, tuple[bytes, tuple[int, ...]]]], wanted: list[tuple[bytes, list[int]]]
) -> None:
    index, known = PartialIndex(), dict[int, tuple[bytes, tuple[int, ...]]]()
    for block, (adds, where) in enumerate(changes):
        if adds and where not in known.values():
            known[block] = where
            index.add(*where, block)
        elif not adds and known:
            victim = sorted(known)[block % len(known)]
            del known[victim]
            index.remove(victim)
        assert index.holds(set(known))
        for parent in PARENTS:
            assert index.has_children(parent) == any(parent == p for p, _ in known.values())
    for parent, tokens in wanted:
        best = max((shared(c, tuple(tokens)) for p, c in known.values() if p == parent), default=0)
        found = index.longest(parent, tokens)
        if not best:
            assert found is None
        else:
            assert found is not None
            assert found.num_tokens == best
            assert known[found.block][0] == parent
            assert shared(known[found.block][1], tuple(tokens)) == best


def test_a_shared_start_is_found_after_a_block_beside_it_has_gone() -> None:
    index = PartialIndex()
    index.add(b"p", [1, 2, 3, 4], 0)
    index.add(b"p", [1, 2, 9, 9], 1)
    index.remove(1)
    assert index.longest(b"p", [1, 2, 9]) == Found(0, 2)
