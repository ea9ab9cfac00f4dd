"""Grammars that take llguidance without end cost their own request only."""

from __future__ import annotations

import os
import queue
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.conftest import Checkpoints
from tests.support.guiding import tokens_of
from tests.support.meeting import wait_until
from tests.support.models import EOS, VOCAB
from trtllm_disagg.engines.embedded import LLM, RequestError, SamplingParams
from trtllm_disagg.engines.embedded.guided_decoding.grammars import grammar_of
from trtllm_disagg.engines.embedded.guided_decoding.trials import GrammarTrials, TrialStart
from trtllm_disagg.engines.embedded.ipc.messages import AddRequest, SamplingSpec
from trtllm_disagg.engines.embedded.params.request_params import GuidedDecodingParams
from trtllm_disagg.errors import DisaggError, EngineError, InvalidRequestError
from trtllm_disagg.processes.interpreter import python

#: llguidance builds one state for each remainder.
ENDLESS = '{"grammars": [{"json_schema": {"type": "integer", "multipleOf": 99999989}}]}'
FINE = '{"grammars": [{"json_schema": {"type": "integer"}}]}'
NO_TEXT = [
    "start: /a+/ start",
    "start: /a*/ start",
    'start: "aaa" loop\nloop: /a+/ loop',
    "root ::= [a]+ root",
    "start: %lark {\nstart: /a+/ start\n}",
    '%llguidance {"no_forcing": false}\nstart: /a+/ start',
]
TAG = '{"structures": [{"begin": "a", "schema": "start: /a+/ start", "end": "a"}], "triggers": ["a"]}'
#: Takes the tokens of `aaaaa`, and dies when it takes it a second.
WALK = """
import json, signal, sys
from pathlib import Path
from trtllm_disagg.engines.embedded.guided_decoding.grammars import read_guide_tokenizer
from trtllm_disagg.engines.embedded.guided_decoding.grammars import Matchers
directory, size, end, token, grammars = json.loads(sys.stdin.readline())
matchers = Matchers(read_guide_tokenizer(Path(directory)), size, [end])
for grammar in grammars:
    signal.setitimer(signal.ITIMER_PROF, 1.0)
    matcher = matchers.compile(grammar)
    for _ in range(5):
        matcher.consume_token(token)
        matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
"""


class Heard:
    """What the trials let through, and what they refused."""

    def __init__(self, start: TrialStart) -> None:
        self.news: queue.SimpleQueue[tuple[int, DisaggError | None]] = queue.SimpleQueue()
        self.trials = GrammarTrials(
            start,
            send=lambda request: self.news.put((request.request_id, None)),
            refuse=lambda request, error: self.news.put((request.request_id, error)),
        )

    def enter(self, request_id: int, grammar: str | None) -> None:
        sampling = SamplingSpec(max_tokens=1, grammar=grammar)
        self.trials.enter(AddRequest(request_id, [5], sampling, "context_and_generation"))

    def next(self) -> tuple[int, DisaggError | None]:
        return self.news.get(timeout=60)


@pytest.fixture(scope="module")
def start(checkpoints: Checkpoints) -> TrialStart:
    return TrialStart(str(checkpoints()), VOCAB, [EOS], cpu_seconds=0.3)


@pytest.fixture
def heard(start: TrialStart) -> Iterator[Heard]:
    heard = Heard(start)
    yield heard
    heard.trials.close()
    assert len(heard.trials) == 0


def test_a_grammar_that_no_text_ends_is_walked_in_time(checkpoints: Checkpoints) -> None:
    params = [GuidedDecodingParams(grammar=text) for text in NO_TEXT]
    grammars = [grammar_of(each) for each in (*params, GuidedDecodingParams(structural_tag=TAG))]
    told = [str(checkpoints()), VOCAB, EOS, *tokens_of("a"), grammars]
    walked = subprocess.run(
        python("-c", WALK), input=msgspec.json.encode(told) + b"\n", capture_output=True, timeout=120
    )
    assert walked.returncode == 0, walked.stderr.decode()


def test_an_endless_grammar_is_refused_and_the_next_one_passes(heard: Heard) -> None:
    heard.enter(1, ENDLESS)
    heard.enter(2, FINE)
    request, error = heard.next()
    assert request == 1
    assert isinstance(error, InvalidRequestError)
    assert str(error) == (
        "guided decoding: llguidance cannot compile this grammar within 0.3 s of processor time and 1024 MiB"
    )
    assert heard.next() == (2, None)


def test_a_grammar_that_needs_too_much_memory_is_refused(start: TrialStart) -> None:
    heard = Heard(msgspec.structs.replace(start, cpu_seconds=60.0, memory_bytes=16 << 20))
    heard.enter(1, ENDLESS)
    assert isinstance(heard.next()[1], InvalidRequestError)
    heard.trials.close()


def test_trial_process_without_cpu_time_is_killed_and_the_grammar_not_refused(start: TrialStart) -> None:
    heard = Heard(msgspec.structs.replace(start, cpu_seconds=60.0, wall_seconds=0.2))
    for request in (1, 2):
        heard.enter(request, ENDLESS)
        error = heard.next()[1]
        assert isinstance(error, EngineError)
        assert str(error).endswith("its process did not get on for 0.2 s")
    heard.trials.close()


def test_a_grammar_with_a_process_that_is_killed_is_tried_again(start: TrialStart) -> None:
    of_others = set(psutil.Process().children())
    heard = Heard(msgspec.structs.replace(start, cpu_seconds=60.0))
    heard.enter(1, FINE)
    assert heard.next() == (1, None)
    (process,) = set(psutil.Process().children()) - of_others
    heard.enter(2, ENDLESS)
    wait_until(lambda: process.cpu_percent(0.05) > 1)
    process.kill()
    error = heard.next()[1]
    assert isinstance(error, EngineError)
    assert str(error).endswith("its process was killed")
    heard.enter(3, FINE)
    assert heard.next() == (3, None)
    heard.trials.close()


def test_a_grammar_after_the_death_of_the_idle_process_is_tried_by_a_new_one(start: TrialStart) -> None:
    of_others = set(psutil.Process().children())
    heard = Heard(start)
    heard.enter(1, FINE)
    assert heard.next() == (1, None)
    (process,) = set(psutil.Process().children()) - of_others
    process.kill()
    # All its threads: the first one may be gone before the others.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    heard.enter(2, ENDLESS)
    assert isinstance(heard.next()[1], InvalidRequestError)
    heard.trials.close()


def test_other_requests_pass_while_a_grammar_is_tried(heard: Heard) -> None:
    heard.enter(1, FINE)
    assert heard.next() == (1, None)
    heard.enter(2, ENDLESS)
    heard.enter(3, None)
    heard.enter(4, FINE)
    assert [heard.next()[0] for _ in range(3)] == [3, 4, 2]


def test_refused_grammar_is_refused_again_without_a_trial(heard: Heard, start: TrialStart) -> None:
    heard.enter(1, ENDLESS)
    _, first = heard.next()
    heard.enter(2, ENDLESS)
    assert heard.next()[1] is first


def test_a_cancelled_request_is_neither_sent_nor_refused(heard: Heard) -> None:
    heard.enter(1, ENDLESS)
    heard.enter(2, FINE)
    assert len(heard.trials) == 2
    for request in (1, 2):
        cancelled = heard.trials.cancel(request)
        assert cancelled is not None
        assert cancelled.request_id == request
    assert heard.trials.cancel(1) is None
    heard.enter(3, FINE)
    assert heard.next() == (3, None)
    assert heard.trials.cancel(3) is None


def test_closing_grammar_trials_drops_waiting_requests(start: TrialStart) -> None:
    heard = Heard(msgspec.structs.replace(start, cpu_seconds=60.0))
    heard.enter(1, ENDLESS)
    heard.trials.close()
    assert heard.news.empty()
    assert len(heard.trials) == 0


def test_a_process_that_cannot_start_fails_the_request_and_not_the_grammar(
    start: TrialStart, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    heard = Heard(msgspec.structs.replace(start, tokenizer=str(tmp_path)))
    for request in (1, 2):
        heard.enter(request, FINE)
        error = heard.next()[1]
        assert isinstance(error, EngineError)
        assert str(error) == "guided decoding: the grammar cannot be tried: its process does not start"
    heard.trials.close()


def test_an_endless_schema_costs_its_own_request_only(checkpoints: Checkpoints) -> None:
    def params(schema: object) -> SamplingParams:
        return SamplingParams(max_tokens=2, guided_decoding=GuidedDecodingParams(json=schema))

    endless = {"type": "integer", "multipleOf": 99999989}
    with LLM(
        checkpoints(),
        guided_decoding_backend="llguidance",
        kv_cache_config={"max_tokens": 512},
        max_seq_len=64,
    ) as llm:
        refused, aborted = (llm.generate_async([5, 6], params(endless)) for _ in range(2))
        aborted.abort()
        assert aborted.result(60).outputs[0].finish_reason == "cancelled"
        assert len(llm.generate_async([5, 6]).result(60).outputs[0].token_ids) > 2
        with pytest.raises(RequestError, match="cannot compile this grammar within 2 s") as caught:
            refused.result(60)
        assert caught.value.category == "InvalidRequest"
        assert llm.num_active_requests == 0
        fine = llm.generate_async([5, 6], params({"type": "boolean"}))
        assert len(fine.result(60).outputs[0].token_ids) == 2
