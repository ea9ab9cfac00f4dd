"""Conditional disaggregation in benchmarks/scenarios.py: which engine computes which prompt, and is each one served?"""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.servers import Occupancy, Place


def occupancy(max_batch_size: int = 4, prefill: int = 1024, decode: int = 96) -> Occupancy:
    return Occupancy({Place.PREFILL: prefill, Place.DECODE: decode}, max_batch_size)


# -- the decision


def test_prompts_that_fit_into_one_step_together_need_not_wait() -> None:
    engines = occupancy()
    engines.start(Place.PREFILL, 512)
    assert engines.place_for(512) is Place.PREFILL
    assert engines.place_for(513) is Place.DECODE
    engines.start(Place.PREFILL, 512)
    engines.start(Place.DECODE, 64)
    assert engines.place_for(32) is Place.DECODE
    assert engines.place_for(33) is None


# -- the line


async def started(turns: list[asyncio.Task[Place]]) -> str:
    """`PD`: the first prompt was given to prefill, the second one to decode, the others wait."""
    for _ in range(3):
        await asyncio.sleep(0)
    return "".join(turn.result().name[0] for turn in turns if turn.done())


@given(data=st.data(), max_batch_size=st.integers(1, 4))
def test_every_prompt_gets_an_engine_in_the_order_of_arrival(
    data: st.DataObject, max_batch_size: int
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=10))
    asyncio.run(serve_all(lengths, occupancy(max_batch_size, prefill=200), data))


async def serve_all(lengths: list[int], engines: Occupancy, data: st.DataObject) -> None:
    """Prompts and answers end in any order. No prompt waits while an engine has room."""
    turns = [asyncio.create_task(engines.place(length)) for length in lengths]
    prompts: list[tuple[Place, int]] = []
    answers, seen = 0, 0
    while True:
        now = len(await started(turns))
        assert all(turn.done() for turn in turns[:now]), "a prompt was overtaken"
        prompts += [(turns[i].result(), lengths[i]) for i in range(seen, now)]
        seen = now
        own = sum(place is Place.DECODE for place, _ in prompts)
        assert engines.rows == answers + own
        assert seen == len(lengths) or engines.place_for(lengths[seen]) is None
        if not prompts and not answers:
            break
        event = data.draw(st.integers(0, len(prompts) + answers - 1))
        if event < len(prompts):
            engines.first_token(*prompts.pop(event))
            answers += 1
        else:
            engines.last_token()
            answers -= 1
    assert seen == len(lengths)
    assert (engines.rows, set(engines.unfinished.values())) == (0, {0})
