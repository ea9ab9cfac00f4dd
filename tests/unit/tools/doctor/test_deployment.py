"""A deployment that is fine, and for each finding that deployment broken there and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.doctor.deployment import Observed, findings, look
from trtllm_disagg.tools.doctor.diagnosis import show
from trtllm_disagg.tools.doctor.rules import Finding
from trtllm_disagg.tools.top.frontend import Answer, AnswerTrace, FrontendClient, ProbeFailedError, Sizes
from trtllm_disagg.tools.top.snapshot import DEAD, SILENT, FrontendLoad, Process, Snapshot, WorkerLoad

TRACE = AnswerTrace("decode_first", "always", [], prefill_instance="f2", kv_transfer_bytes=393216)
ANSWER = Answer(165, 0, 0.0, 0x42, 0x42, TRACE)
PROCESSES = (
    Process("frontend", "frontend", "ready"),
    Process("prefill-0", "prefill", "ready"),
    Process("decode-0", "decode", "ready"),
)
SNAPSHOT = Snapshot(1.0, "http://f:8000", "demo", "decode_first", "", PROCESSES, FrontendLoad())
REPEATED = replace(ANSWER, cached_tokens=160, hit_rate=0.8)
FINE = Observed("http://f:8000", "demo", SNAPSHOT, ANSWER, repeated=REPEATED, seconds=0.3)


def broken(seen: Observed) -> list[Finding]:
    return [finding for finding in findings(seen) if finding.verdict != "ok"]


def the_one(seen: Observed) -> Finding:
    (finding,) = broken(seen)
    return finding


def verdicts(seen: Observed) -> list[tuple[str, str]]:
    return [(finding.rule, finding.verdict) for finding in broken(seen)]


def traced(**changes: Any) -> Observed:
    trace = AnswerTrace(**{name: getattr(TRACE, name) for name in AnswerTrace.__struct_fields__} | changes)
    return replace(FINE, plain=replace(ANSWER, trace=trace))


def with_processes(*processes: Process) -> Observed:
    return replace(FINE, snapshot=replace(SNAPSHOT, processes=processes))


def test_healthy_deployment_has_no_finding_but_facts() -> None:
    assert broken(FINE) == []
    assert {finding.rule: finding.values["value"] for finding in findings(FINE)} == {
        "answers": "demo, a prompt of 165 tokens",
        "workers": "prefill-0, decode-0",
        "order": "decode_first (always)",
        "both stages": "yes, prefill f2",
        "KV moved": "393,216 bytes",
        "KV events": "the router found 80% of the blocks after 0.3 s",
    }


def test_words_of_a_deployment_reach_no_terminal_as_commands(capsys: pytest.CaptureFixture[str]) -> None:
    seen = replace(traced(reason="\x1b[2J", fallbacks=["local: \x1b]0;x\x07"]), model="[/b]")
    show(findings(seen), (seen.url,), f"{seen.model} at {seen.url}")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[/b] at http" in shown


def test_a_request_that_failed_is_an_error_and_what_would_follow_from_it_is_left_out() -> None:
    seen = replace(FINE, plain=ProbeFailedError("503: no instance"), repeated=None)
    assert verdicts(seen) == [("answers", "error")]
    assert the_one(seen).instead.startswith("503: no instance")
    assert {each.rule for each in findings(seen)} == {"answers", "workers"}


OPEN = replace(PROCESSES[2], load=WorkerLoad(breakers_open=1))
MOVED, REUSED = replace(REPEATED, hit_rate=0.0), replace(REPEATED, cached_tokens=0, hit_rate=0.0)


@pytest.mark.parametrize(
    ("seen", "rule", "verdict", "words"),
    [
        (with_processes(PROCESSES[0], PROCESSES[2]), "workers", "error", "start a prefill worker"),
        (with_processes(PROCESSES[0], PROCESSES[1]), "workers", "error", "start a decode worker"),
        *(
            (
                with_processes(*PROCESSES, Process("decode-1", "decode", state)),
                "workers",
                "error",
                f"decode-1: {state}",
            )
            for state in (DEAD, SILENT)
        ),
        (with_processes(*PROCESSES[:2], OPEN), "workers", "note", "decode-0"),
        (with_processes(PROCESSES[0]), "workers", "not known", ""),
        (
            traced(strategy="prefill_first", prefill_instance=None, decode_instance="42"),
            "order",
            "note",
            "decode_first",
        ),
        (traced(kv_transfer_bytes=0), "KV moved", "error", ""),
        (traced(kv_transfer_bytes=None), "KV moved", "not known", "--publish-metrics"),
        (replace(FINE, repeated=MOVED), "KV events", "error", "--publish-kv-events"),
        (replace(FINE, repeated=REUSED), "KV events", "error", "kv_cache_config.enable_block_reuse: true"),
        (replace(FINE, repeated=replace(REPEATED, hit_rate=None)), "KV events", "note", "--router-mode kv"),
    ],
)
def test_a_deployment_with_one_fault_gets_exactly_that_finding(
    seen: Observed, rule: str, verdict: str, words: str
) -> None:
    finding = the_one(seen)
    assert (finding.rule, finding.verdict) == (rule, verdict)
    assert words in finding.instead


@pytest.mark.parametrize("role", ["agg", "worker"])
def test_an_agg_deployment_needs_no_second_role_and_moves_no_kv(role: str) -> None:
    seen = with_processes(PROCESSES[0], Process("agg-0", role, "ready"))
    seen = replace(seen, plain=replace(ANSWER, trace=AnswerTrace("agg", "default")))
    seen = replace(seen, snapshot=replace(seen.snapshot, strategy="agg"))
    assert broken(seen) == []
    assert "KV moved" not in {finding.rule for finding in findings(seen)}


def test_a_request_served_by_a_fallback_is_an_error_that_names_it() -> None:
    lost = "local: no instance is there"
    seen = traced(fallbacks=[lost], prefill_instance=None, kv_transfer_bytes=None)
    assert verdicts(seen) == [("order", "error"), ("both stages", "error")]
    assert all(lost in each.instead for each in broken(seen))


def test_local_request_is_a_note_when_an_ordered_one_crosses_and_an_error_when_it_does_not() -> None:
    stayed = traced(strategy="local", reason="short", prefill_instance=None, kv_transfer_bytes=None)
    finding = the_one(replace(stayed, ordered=ANSWER))
    assert (finding.rule, finding.verdict, finding.values["value"]) == ("order", "note", "local (short)")
    assert ("both stages", "error") in verdicts(replace(stayed, ordered=stayed.plain))
    assert ("both stages", "error") in verdicts(replace(stayed, ordered=ProbeFailedError("503")))


def test_workers_of_another_project_leave_order_and_stages_unknown() -> None:
    seen = replace(FINE, plain=replace(ANSWER, trace=None))
    assert verdicts(seen) == [("order", "not known"), ("both stages", "not known")]


def test_two_workers_that_the_frontend_chained_are_both_stages() -> None:
    trace = AnswerTrace("router", "default", kv_transfer_bytes=1)
    seen = replace(FINE, plain=Answer(165, 0, 0.0, 0xF2, 0x42, trace))
    assert [f.values["value"] for f in findings(seen) if f.rule == "both stages"] == [
        "yes, prefill f2 and decode 42"
    ]


@dataclass
class FakeFrontend(FrontendClient):
    """Gives each answer once, and the last one again and again."""

    answers: list[Answer | ProbeFailedError] = field(default_factory=list)
    served: list[str] = field(default_factory=lambda: ["demo"])
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    url: str = "http://f:8000"

    def models(self) -> list[str]:
        return self.served

    def sizes(self, model: str) -> Sizes:
        return Sizes(32, 4096)

    def ask(self, model: str, prompt: str, annotations: tuple[str, ...] = ()) -> Answer:
        self.asked.append((prompt, annotations))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ProbeFailedError):
            raise answer
        return answer


class FakeObserver:
    async def look(self) -> Snapshot:
        return SNAPSHOT


def seen_by(frontend: FakeFrontend, model: str | None = None) -> Observed:
    return look(frontend, FakeObserver(), model, lambda text: None, seconds=0.0)


def test_local_answer_is_followed_by_a_prompt_with_the_deployments_order() -> None:
    stayed = replace(ANSWER, trace=AnswerTrace("local", "short"))
    frontend = FakeFrontend([stayed, ANSWER, REPEATED])
    seen = seen_by(frontend)
    assert (seen.plain, seen.ordered, seen.repeated) == (stayed, ANSWER, REPEATED)
    assert [annotations for _, annotations in frontend.asked] == [(), ("disagg:decode_first",), ()]
    assert frontend.asked[0][0] == frontend.asked[2][0] != frontend.asked[1][0]


def test_a_request_that_fails_is_kept_with_what_can_still_be_seen() -> None:
    failed = ProbeFailedError("503")
    seen = seen_by(FakeFrontend([failed]))
    assert (seen.plain, seen.repeated, seen.snapshot) == (failed, None, SNAPSHOT)


@pytest.mark.parametrize(
    ("served", "model", "named"),
    [
        ([], None, "no worker is registered"),
        (["a", "b"], None, "--model is missing"),
        (["a"], "c", "--model: 'c'"),
    ],
)
def test_a_model_that_cannot_be_asked_is_refused_by_name(
    served: list[str], model: str | None, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        seen_by(FakeFrontend([ANSWER], served), model)
    assert seen_by(FakeFrontend([ANSWER], ["a", "b"]), "b").model == "b"
