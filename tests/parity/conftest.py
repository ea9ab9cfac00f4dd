"""The deployments' answers, and the right ones: the engine's own for agg, agg's for every other strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.parity.answers import Answer, Question, Refusal, ask
from tests.parity.oracle import Oracle
from tests.support.deployments import Fleet, vision_model

Answers = list[Answer | Refusal]


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    oracle = Oracle(vision_model())
    yield oracle
    oracle.close()


class Examination:
    """Puts every question once to each deployment: a second time, it would be in the cache."""

    def __init__(self, fleet: Fleet, oracle: Oracle) -> None:
        self._fleet = fleet
        self._oracle = oracle
        self._given: dict[tuple[str, str], Answers] = {}

    def answers(self, strategy: str, questions: Sequence[Question]) -> Answers:
        """The salt of the questions names them."""
        name = (strategy, questions[0].salt)
        if name not in self._given:
            self._given[name] = [ask(self._fleet[strategy].openai, question) for question in questions]
        return self._given[name]

    def right_answers(self, strategy: str, questions: Sequence[Question]) -> Answers:
        if strategy == "agg":
            return [self._oracle.answer(question) for question in questions]
        return self.answers("agg", questions)


@pytest.fixture(scope="session")
def examination(fleet: Fleet, oracle: Oracle) -> Examination:
    return Examination(fleet, oracle)
