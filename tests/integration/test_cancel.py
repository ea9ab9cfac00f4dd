"""The client hangs up, at ten moments of every kind: nothing stays behind, and the next answer is right."""

from __future__ import annotations

import json
import random
import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.parity.answers import Answer, Question, Refusal, ask
from tests.support.deployments import DISAGGREGATED, MODEL_NAME, RUN_BY_WORKERS, Fleet, Served, wait_until

TIMES = 10
#: Its prefill takes long enough to leave in the middle of it.
LONG_PROMPT = 1000
#: Several steps of the engine.
LONGEST_PROMPT = 1900
#: Tokens that take seconds.
MANY = 1900
#: As many as fit behind each of these prompts: long enough for a busy machine to see that the request runs.
BEHIND_LONG, BEHIND_LONGEST = 1000, 100

INFLIGHT = "dynamo_component_inflight_requests"
DECODED = "trtllm_disagg_decode_tokens_total"
PREFILLED = "trtllm_disagg_prefill_tokens_total"

every_strategy = pytest.mark.parametrize("strategy", DISAGGREGATED)


@contextmanager
def streaming(deployed: Served, num_prompt: int, max_tokens: int) -> Iterator[HTTPConnection]:
    """The request is sent, nothing is read. Leaving the block hangs up."""
    body = {
        "model": MODEL_NAME,
        "prompt": random.choices(range(300, 1300), k=num_prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    config = deployed.deployment.config
    with closing(HTTPConnection(config.client_host, config.http_port, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        yield connection


def read_tokens(connection: HTTPConnection, count: int) -> None:
    response = connection.getresponse()
    assert response.status == 200
    while count:
        count -= response.readline().startswith(b"data: {")


def right_answer(fleet: Fleet, question: Question) -> Answer | Refusal:
    return ask(fleet["agg"].openai, replace(question, salt=f"{question.salt} {time.monotonic()}"))


def wait_until_all_know(deployed: Served) -> None:
    wait_until(lambda: deployed.total(INFLIGHT) == 0, "all workers know that the client is gone")


def assert_nothing_happened(deployed: Served, fleet: Fleet, asked: str) -> None:
    deployed.wait_until_idle()
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 0.8, "seed": 5}
    question = Question("chat", [{"role": "user", "content": "And now?"}], options, salt=asked)
    assert ask(deployed.openai, question) == right_answer(fleet, question)
    deployed.wait_until_idle()


@every_strategy
def test_client_that_leaves_during_decode_stops_it(strategy: str, deployed: Served, fleet: Fleet) -> None:
    deployed.wait_until_idle()
    before = deployed.total(DECODED)

    for count in range(1, TIMES + 1):
        with streaming(deployed, num_prompt=100, max_tokens=MANY) as connection:
            read_tokens(connection, count)
        wait_until_all_know(deployed)

    assert deployed.total(DECODED) - before < TIMES * MANY / 4, "no worker goes on for a client that left"
    assert_nothing_happened(deployed, fleet, f"tokens {strategy}")


@every_strategy
def test_a_client_that_hangs_up_before_the_first_token_leaves_nothing_running(
    strategy: str, deployed: Served, fleet: Fleet
) -> None:
    """From just after the request's arrival until its first token is due."""
    started = time.monotonic()
    with streaming(deployed, LONG_PROMPT, max_tokens=2) as connection:
        read_tokens(connection, 1)
    seconds_to_first_token = time.monotonic() - started
    deployed.wait_until_idle()

    for moment in range(TIMES):
        with streaming(deployed, LONG_PROMPT, max_tokens=BEHIND_LONG) as connection:
            wait_until(lambda: deployed.total(INFLIGHT) > 0, "it has arrived")
            select.select([connection.sock], [], [], seconds_to_first_token * moment / TIMES)
        wait_until_all_know(deployed)

    assert_nothing_happened(deployed, fleet, f"first {strategy}")


# Under router, the frontend calls the prefill worker, and does not tell it that the client has left.
@pytest.mark.parametrize("strategy", RUN_BY_WORKERS)
def test_a_running_prefill_stops_in_the_middle_of_its_prompt(strategy: str, deployed: Served) -> None:
    deployed.wait_until_idle()
    started = time.monotonic()
    with streaming(deployed, LONGEST_PROMPT, max_tokens=1) as connection:
        read_tokens(connection, 1)
    seconds = time.monotonic() - started

    computed = []
    for moment in range(TIMES):
        deployed.wait_until_idle()
        before = deployed.total(PREFILLED)
        with streaming(deployed, LONGEST_PROMPT, max_tokens=BEHIND_LONGEST) as connection:
            wait_until(lambda: deployed.total(INFLIGHT) > 0, "it has arrived")
            select.select([connection.sock], [], [], seconds * moment / TIMES)
        deployed.wait_until_idle()
        computed.append(deployed.total(PREFILLED) - before)
        if 0 < computed[-1] < LONGEST_PROMPT:
            return

    pytest.fail(f"never in the middle of {LONGEST_PROMPT} tokens: {computed}")


@every_strategy
def test_many_clients_that_hang_up_at_once_disturb_no_other_answer(
    strategy: str, deployed: Served, fleet: Fleet
) -> None:
    """While others go on: those get their whole answers."""
    deployed.wait_until_idle()
    stays = Question(
        "completions", "Go on.", {"max_tokens": 150, "ignore_eos": True}, stream=True, salt="go on"
    )

    with ThreadPoolExecutor(1) as staying:
        answer = staying.submit(ask, deployed.openai, stays)
        for _ in range(3):
            with (
                streaming(deployed, 50, MANY) as one,
                streaming(deployed, 50, MANY) as two,
                streaming(deployed, LONG_PROMPT, 100),
            ):
                read_tokens(one, 1)
                read_tokens(two, 2)

    assert answer.result() == right_answer(fleet, stays)
    assert_nothing_happened(deployed, fleet, f"many {strategy}")
