"""What an error says may have been written by a client: into logs, terminals and answers it goes as text."""

from __future__ import annotations

import logging

import pytest
from dynamo.llm import exceptions as dynamo_errors

from trtllm_disagg.dynamo_runtime.error_mapping import from_dynamo, to_dynamo
from trtllm_disagg.errors import ConfigError, DisaggError, InvalidRequestError

FORGED = "bad\n12:00:00.000 ERROR root: all is lost\r\x1b[2J\x9b31m\u2028end"


@pytest.mark.parametrize("kind", [InvalidRequestError, ConfigError, DisaggError])
def test_control_characters_in_a_message_are_shown_not_sent(kind: type[DisaggError]) -> None:
    text = str(kind(FORGED))
    assert "\\x1b[2J\\x9b31m\\u2028end" in text
    assert all(character.isprintable() for character in text.replace("\n", ""))


def test_a_further_line_of_a_message_is_no_line_of_a_log(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger(__name__).warning("request: %s", InvalidRequestError(FORGED))
    first, *further = caplog.text.splitlines()
    assert first.endswith("request: bad")
    assert further
    assert all(line.startswith("  ") for line in further)


def test_a_message_keeps_its_lines_and_tabs_on_its_way_over_two_workers() -> None:
    """A parser points at the place of a mistake."""
    text = 'at 1(8):\n    "[0-9\n    ^\n\tunclosed'
    once = str(InvalidRequestError(text))
    assert once == 'at 1(8):\n    "[0-9\n    ^\n  \tunclosed'
    sent = to_dynamo(InvalidRequestError(text))
    assert isinstance(sent, dynamo_errors.InvalidArgument)
    assert str(from_dynamo(sent)) == once


def test_a_message_without_them_is_as_it_was_given() -> None:
    assert str(InvalidRequestError("n=2: é 你 🚀 'x\\y'")) == "n=2: é 你 🚀 'x\\y'"
    assert str(DisaggError()) == ""
