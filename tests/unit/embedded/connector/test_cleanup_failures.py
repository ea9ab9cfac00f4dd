"""What fails while a failed transfer is cleaned up after hangs nobody, and costs no block."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.meeting import Duo
from tests.unit.embedded.core.test_core_handoff import prompt

BLOCK = 32


def fails(*_: object) -> int:
    return 1 // 0


@pytest.fixture
def duo(checkpoints: Checkpoints) -> Iterator[Duo]:
    prefill, decode = (
        Core(checkpoints(), cache_transceiver_config={"backend": "SHARED_MEMORY"}) for _ in range(2)
    )
    duo = Duo(prefill, decode)
    yield duo
    duo.close()


def test_a_pull(duo: Duo, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(3 * BLOCK)
    handoff = duo.prefill.prefill(tokens)
    for name in ("read", "forget"):
        monkeypatch.setattr(duo.decode.transfers._transport, name, fails)

    answer = duo.decode.run(duo.decode.add_decode(tokens, handoff))

    assert (answer.category, answer.error) == (
        "Unavailable",
        "ZeroDivisionError: integer division or modulo by zero",
    )
    duo.assert_idle()


def test_a_push(duo: Duo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill reads what decode knows before it writes the rest."""
    stem = prompt(2 * BLOCK)
    duo.decode.generate(stem, 1)
    for name in ("read", "forget"):
        monkeypatch.setattr(duo.prefill.transfers._transport, name, fails)

    met = duo.both([*stem, 5])
    duo.run()

    assert met.prefill is not None
    for answer in (duo.prefill.answers[met.prefill, 0], duo.answer(met)):
        assert answer.category == "Unavailable"
    duo.assert_idle()
