"""A transport is one line of a table: a toy one is configured, chosen and used by nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.unit.engines.embedded.core.test_core_handoff import prompt
from trtllm_disagg.engines.embedded.kv_transfer.access import OneHost
from trtllm_disagg.engines.embedded.kv_transfer.transports import (
    TRANSPORTS,
    TransportSpec,
    backends,
    create_transport,
)
from trtllm_disagg.errors import ConfigError

TOY = TransportSpec("TOY", "tests.support.fake_transport:FakeTransport", (OneHost,))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, "TOY", TOY)


@pytest.fixture
def pair(toy: None, checkpoints: Checkpoints) -> Iterator[tuple[Core, Core]]:
    pair = [Core(checkpoints(), cache_transceiver_config={"backend": "TOY"}) for _ in range(2)]
    yield pair[0], pair[1]
    for core in pair:
        core.close()


def test_a_line_in_the_table_is_enough_for_a_handoff(
    pair: tuple[Core, Core], checkpoints: Checkpoints
) -> None:
    prefill, decode = pair
    tokens = prompt(70)
    answer = decode.run(decode.add_decode(tokens, prefill.prefill(tokens)))
    agg = Core(checkpoints())
    assert answer.tokens == agg.generate(tokens)
    assert prefill.connector.transport == "FAKE"
    for core in (prefill, decode, agg):
        core.assert_idle()
    agg.close()


@pytest.mark.parametrize("backend", ["TOY", "shared_memory"])
def test_a_name_that_is_not_in_the_table_is_refused(checkpoints: Checkpoints, backend: str) -> None:
    with pytest.raises(ValueError, match=f"{' or '.join(map(repr, [*backends()][-2:]))}.*'{backend}'"):
        Core(checkpoints(), cache_transceiver_config={"backend": backend})


def test_a_transport_with_a_library_that_is_not_here_is_refused_without_advice_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = TransportSpec("ABSENT", "no_such_library.transport:Transport", (OneHost,))
    monkeypatch.setitem(TRANSPORTS, "ABSENT", absent)
    with pytest.raises(ConfigError, match="a machine on which ABSENT is installed") as refused:
        create_transport("ABSENT", OneHost())
    assert "nixl" not in str(refused.value)
