"""What fails while a failed transfer is cleaned up after lets no request hang, and costs no block."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.fake_transport import Fails, FakeTransport
from tests.support.meeting import Duo
from tests.unit.engines.embedded.core.test_core_handoff import prompt

BLOCK = 32


@pytest.fixture
def fake() -> FakeTransport:
    """Its reads fail, and what is done about that, too."""
    fake = FakeTransport()
    fake.always("read", Fails(ZeroDivisionError("division by zero")))
    fake.always("forget", Fails(ZeroDivisionError("division by zero")))
    return fake


@pytest.fixture
def make_duo(checkpoints: Checkpoints) -> Iterator[Callable[..., Duo]]:
    made: list[Duo] = []

    def make(prefill: FakeTransport, decode: FakeTransport) -> Duo:
        backend = {"cache_transceiver_config": {"backend": "SHARED_MEMORY"}}
        first, second = (Core(checkpoints(), **backend, transport=each) for each in (prefill, decode))
        made.append(Duo(first, second))
        return made[-1]

    yield make
    for duo in made:
        duo.close()


def test_a_failed_pull_leaks_no_block_although_cleaning_up_fails(
    make_duo: Callable[..., Duo], fake: FakeTransport
) -> None:
    duo = make_duo(FakeTransport(), fake)
    tokens = prompt(3 * BLOCK)
    handoff = duo.prefill.prefill(tokens)

    answer = duo.decode.run(duo.decode.add_decode(tokens, handoff))

    assert (answer.category, answer.error) == ("Unavailable", "ZeroDivisionError: division by zero")
    duo.assert_idle()


def test_a_failed_push_leaks_no_block_although_cleaning_up_fails(
    make_duo: Callable[..., Duo], fake: FakeTransport
) -> None:
    """Prefill reads what decode knows before it writes the rest."""
    duo = make_duo(fake, FakeTransport())
    stem = prompt(2 * BLOCK)
    duo.decode.generate(stem, 1)

    met = duo.both([*stem, 5])
    duo.run()

    assert met.prefill is not None
    for answer in (duo.prefill.answers[met.prefill, 0], duo.answer(met)):
        assert answer.category == "Unavailable"
    duo.assert_idle()
