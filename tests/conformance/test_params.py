"""The plain data classes of a request and of its answer."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from tests.conformance.api import find

#: For the others, tests/unit/engines/recording/test_llm_api_pins.py.
CLASSES: dict[str, dict[str, Any]] = {
    "SchedulingParams": {"attention_dp_rank": None, "attention_dp_relax": None},
    "Logprob": {"rank": None},
}
FIELDS = [(name, field) for name, fields in CLASSES.items() for field in fields]


# -- fields and defaults


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_field_has_its_default(name: str, field: str) -> None:
    fields = {item.name: item for item in dataclasses.fields(find(name))}
    assert field in fields
    assert fields[field].default == CLASSES[name][field]


@pytest.mark.parametrize("name", ["DisaggregatedParams", "CompletionOutput", "Logprob"])
def test_setting_an_unknown_attribute_raises(name: str) -> None:
    """Slots: a client that sets an unknown field hears of it."""
    made = find(name)(
        **({"index": 0} if name == "CompletionOutput" else {}),
        **({"logprob": -1.0} if name == "Logprob" else {}),
    )
    with pytest.raises(AttributeError):
        made.no_such_field = 1


def test_dataclasses_replace_gives_an_independent_copy() -> None:
    """How Dynamo makes a request's parameters out of its defaults."""
    first = find("SamplingParams")(max_tokens=5, stop_token_ids=[7])
    second = dataclasses.replace(first, max_tokens=6, temperature=0.0)
    assert (first.max_tokens, second.max_tokens) == (5, 6)
    assert (second.temperature, second.stop_token_ids) == (0.0, [7])
    with pytest.raises(TypeError):
        dataclasses.replace(first, no_such_field=1)


# -- SamplingParams


def test_best_of_must_cover_n() -> None:
    assert find("SamplingParams")(n=2, best_of=2, temperature=1.0).best_of == 2
    with pytest.raises(ValueError):
        find("SamplingParams")(n=2, best_of=1)


def test_guides_exclude_each_other() -> None:
    """The facts do not say whether the one class or the other complains."""
    with pytest.raises(ValueError):
        find("SamplingParams")(guided_decoding=find("GuidedDecodingParams")(json="{}", regex="a"))


# -- DisaggregatedParams


@pytest.mark.parametrize("kind", ["context_only", "generation_only", "context_and_generation"])
def test_request_types_are_lower_cased(kind: str) -> None:
    assert find("DisaggregatedParams")(request_type=kind.upper()).request_type == kind


def test_an_unknown_request_type_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown request type"):
        find("DisaggregatedParams")(request_type="prefill")


def test_parameters_survive_a_dict() -> None:
    """The wire carries asdict(): decode makes `DisaggregatedParams(**dict)`, with every field of prefill's."""
    given = find("DisaggregatedParams")(
        request_type="context_only", first_gen_tokens=[5], ctx_request_id=7, opaque_state=b"\x00\xff"
    )
    assert find("DisaggregatedParams")(**dataclasses.asdict(given)) == given


# -- get_global_disagg_request_id


def new_id(*args: Any) -> int:
    return int(find("get_global_disagg_request_id")(*args))


def test_global_ids_are_large_unique_and_fit_63_bits() -> None:
    ids = [new_id(3, 5) for _ in range(500)]
    assert len(set(ids)) == len(ids)
    assert all(find("MIN_GLOBAL_ID") <= made < 2**63 for made in ids)
    assert find("MIN_GLOBAL_ID") == 1 << 40


def test_global_ids_of_different_processes_differ() -> None:
    """Within a millisecond, only node (8 bits), process (6) and a counter (10) tell ids apart."""
    low = {
        (new_id(node, process) - (1 << 40)) >> 10 & 0x3FFF for node, process in ((1, 0), (0, 1), (255, 63))
    }
    assert low == {1 << 6, 1, (255 << 6) + 63}


def test_the_process_is_optional() -> None:
    assert inspect.signature(find("get_global_disagg_request_id")).parameters["process_id"].default == 0
    assert new_id(7) >= 1 << 40


@pytest.mark.parametrize("parts", [(-1, 0), (256, 0), (0, -1), (0, 64)])
def test_a_part_of_an_id_out_of_range_is_refused(parts: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        new_id(*parts)
