"""One name, one model: the second worker with another model is refused, and of two that come together one stays."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_disagg.admin.commands import DescribedInstance
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.worker.pairing import ModelIdentity
from trtllm_disagg.worker.startup_checks import ModelNameGuard

MINE = ModelIdentity(model="tiny", source="/models/a", weights="aaaa")
PLACE = "dyn://dynamo.tensorrt_llm.generate"


def said(identity: ModelIdentity, **more: Any) -> dict[str, Any]:
    return {"role": "agg", **identity.described(), **more}


def guard_of(*seen: DescribedInstance, mine: ModelIdentity = MINE, place: str = PLACE) -> ModelNameGuard:
    async def look() -> list[DescribedInstance]:
        return list(seen)

    return ModelNameGuard(mine, 5, {place}, look)


def guard(*others: dict[str, Any]) -> ModelNameGuard:
    itself = {"role": "agg", "model": MINE.model, "weights": "of no interest"}
    return guard_of(*(DescribedInstance(PLACE, 5 + i, each) for i, each in enumerate([itself, {}, *others])))


async def test_another_model_behind_the_same_name_is_named_with_both() -> None:
    other = said(replace(MINE, source="/models/b", weights="bbbb"))
    with pytest.raises(ConfigError) as caught:
        await guard(said(MINE), other).require_same()
    message = str(caught.value)
    assert message.startswith("--model: '/models/a' (hash aaaa) is not allowed; expected")
    for word in ("'tiny'", "'/models/b' (hash bbbb)", "agg 8", PLACE, "--served-model-name", "--namespace"):
        assert word in message


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"token_ids": []},
        {"model": "tiny"},
        said(MINE),
        said(replace(MINE, source="/copies/of/a")),
    ],
)
async def test_workers_of_other_names_or_roles_are_not_compared(other: dict[str, Any]) -> None:
    await guard(other).require_same()
    await guard(other).confirm()


async def test_prefill_and_decode_may_hold_one_model_in_two_precisions() -> None:
    fp4 = replace(MINE, weights="bbbb", layout="same", precision="nvfp4", role="prefill")
    fp8 = replace(fp4, weights="cccc", precision="fp8", role="decode")

    def between(mine: ModelIdentity, other: ModelIdentity) -> ModelNameGuard:
        return guard_of(DescribedInstance(PLACE, 9, other.described()), mine=mine)

    await between(fp4, fp8).require_same()
    with pytest.raises(ConfigError, match="hash cccc"):
        await between(fp4, replace(fp8, role="prefill")).require_same()


async def test_one_endpoint_is_for_one_name() -> None:
    """Dynamo holds one model for each; and a worker calls any worker at the other role's."""
    other = DescribedInstance(PLACE, 7, said(replace(MINE, model="another")))
    await guard_of(other, place="dyn://apart.tensorrt_llm.generate").require_same()
    with pytest.raises(ConfigError) as caught:
        await guard_of(other).require_same()
    message = str(caught.value)
    assert message.startswith("--served-model-name: 'tiny' is not allowed; expected 'another', which agg 7")
    assert PLACE in message
    assert "--namespace" in message


async def test_workers_that_only_workers_call_share_no_endpoint_with_others() -> None:
    """A frontend that goes round the endpoint would send them requests."""

    def beside(mine: ModelIdentity, other: dict[str, Any], place: str = PLACE) -> ModelNameGuard:
        return guard_of(DescribedInstance(place, 7, other), mine=mine)

    decode = replace(MINE, role="decode", is_worker_side=True)
    called = said(decode, strategy="decode_first")
    with pytest.raises(ConfigError, match=r"--namespace: decode 7 at .* under decode_first"):
        await beside(MINE, called).require_same()
    with pytest.raises(ConfigError, match="--namespace: agg 7"):
        await beside(decode, said(MINE, strategy="agg")).require_same()
    await beside(MINE, called, "dyn://dynamo.elsewhere.generate").require_same()
    await beside(decode, called).require_same()
    older = {key: value for key, value in called.items() if key != "is_worker_side"}
    await beside(MINE, older).require_same()


async def test_empty_discovery_is_looked_at_once_more() -> None:
    """Discovery may not have told anything yet."""
    looks = iter([[], [DescribedInstance(PLACE, 7, said(replace(MINE, weights="bbbb")))]])

    async def look() -> list[DescribedInstance]:
        return next(looks)

    with pytest.raises(ConfigError, match="by agg 7"):
        await ModelNameGuard(MINE, 5, {PLACE}, look, poll_seconds=0).require_same()


async def test_worker_is_refused_when_a_settled_one_has_another_model() -> None:
    other = replace(MINE, weights="bbbb")
    mine = guard(said(other, settled=True))
    with pytest.raises(ConfigError, match="hash bbbb"):
        await mine.confirm()
    assert mine.described()["settled"] is False


async def test_a_conflict_that_lasts_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    other = DescribedInstance(PLACE, 9, said(replace(MINE, weights="bbbb"), settled=False))
    listed = iter([[other], [other], [other], []])

    async def look() -> list[DescribedInstance]:
        await asyncio.sleep(0.001)
        return next(listed)

    await ModelNameGuard(MINE, 5, {PLACE}, look, poll_seconds=0, visible_seconds=0).confirm()
    assert caplog.text.count("waiting for a worker to end") == 1
    assert "hash bbbb" in caplog.text


class Place:
    """Where workers that start together list themselves, look, and leave when they are refused. Whatever takes time
    takes as many turns of the loop as `chance` says.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.there: dict[int, ModelNameGuard] = {}

    async def pause(self) -> None:
        for _ in range(self._chance.randrange(8)):
            await asyncio.sleep(0)

    async def start(self, instance_id: int, identity: ModelIdentity) -> bool:
        """Whether it serves."""

        async def look() -> list[DescribedInstance]:
            snapshot = list(self.there.items())
            await self.pause()
            answers = []
            for i, other in snapshot:
                await self.pause()
                if i in self.there:
                    answers.append(DescribedInstance(PLACE, i, {"role": "agg", **other.described()}))
            return answers

        mine = ModelNameGuard(identity, instance_id, {PLACE}, look, poll_seconds=0.0)
        try:
            await self.pause()
            await mine.require_same()
            await self.pause()
            self.there[instance_id] = mine
            await self.pause()
            await mine.confirm()
        except ConfigError:
            await self.pause()
            self.there.pop(instance_id, None)
            return False
        return True


MODELS = (MINE, replace(MINE, weights="bbbb"), replace(MINE, model="another"))


@given(seed=st.integers(0, 2**32), models=st.lists(st.sampled_from(MODELS), min_size=2, max_size=5))
@settings(deadline=None, max_examples=150)
def test_workers_of_two_models_that_start_together_leave_one_model(
    seed: int, models: list[ModelIdentity]
) -> None:
    async def run() -> list[bool]:
        place = Place(random.Random(seed))
        starts = (place.start(i, each) for i, each in enumerate(models))
        async with asyncio.timeout(10):
            return await asyncio.gather(*starts)

    serves = asyncio.run(run())
    assert len({each for each, stays in zip(models, serves, strict=True) if stays}) == 1
