"""A deployment that is fine, and for each finding that deployment broken there and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trtllm_disagg.processes.dev_shm import MIB
from trtllm_disagg.processes.limits import INOTIFY_KEY, MachineLimits, Needs
from trtllm_disagg.tools.doctor.diagnosis import show_live
from trtllm_disagg.tools.doctor.frontend import Answer, AnswerTrace, ProbeFailedError
from trtllm_disagg.tools.doctor.live import Observed, ObservedWorker, Repeats
from trtllm_disagg.tools.doctor.live_rules import Finding, findings
from trtllm_disagg.tools.doctor.this_machine import LocalProcess
from trtllm_disagg.worker.pairing import PROPERTIES

PREFILL_ID, DECODE_ID = 0xF2, 0x42
FRONTEND = LocalProcess(1, argv=("python", "-m", "dynamo.frontend"), open_files=40, max_open_files=20000)
PROCESS = LocalProcess(2, open_files=90, max_open_files=20000)
LIMITS = MachineLimits(
    max_inotify_instances=128,
    free_inotify_instances=9,
    max_open_files=20000,
    ptrace_scope=0,
    free_shared_memory=64 * MIB,
)


def description(role: str, **changes: Any) -> dict[str, Any]:
    same = {each.key: "same" for each in PROPERTIES} | {"max_seq_len": 4096, "trtllm_version": None}
    versions = {"trtllm_disagg": "0.1.0", "ai_dynamo": "1.6.1"}
    return (
        same
        | {"role": role, "strategy": "decode_first", "engine": "embedded", "versions": versions}
        | changes
    )


TRACE = AnswerTrace("decode_first", "always", [], prefill_instance="f2", kv_transfer_bytes=393216)
ANSWER = Answer(165, 0, 0.0, DECODE_ID, DECODE_ID, TRACE)
FINE = Observed(
    "http://127.0.0.1:8000",
    "demo",
    ANSWER,
    repeats=Repeats(replace(ANSWER, cached_tokens=160, hit_rate=0.8), 0.3),
    workers=(
        ObservedWorker(DECODE_ID, "decode", description("decode"), PROCESS),
        ObservedWorker(PREFILL_ID, "prefill", description("prefill"), PROCESS),
    ),
    frontend=FRONTEND,
    needs=Needs(inotify_instances=9, peers=2),
    limits=LIMITS,
)


def broken(seen: Observed) -> list[Finding]:
    return [finding for finding in findings(seen) if finding.verdict != "ok"]


def test_words_of_a_deployment_reach_no_terminal_as_commands(capsys: pytest.CaptureFixture[str]) -> None:
    seen = replace(traced(reason="\x1b[2J", fallbacks=["local: \x1b]0;x\x07"]), model="[/b]")
    show_live(seen, findings(seen))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"\x1b[2J" in shown
    assert "[/b] at http" in shown


def the_one(seen: Observed) -> Finding:
    (finding,) = broken(seen)
    return finding


def traced(**changes: Any) -> Observed:
    trace = AnswerTrace(**{name: getattr(TRACE, name) for name in AnswerTrace.__struct_fields__} | changes)
    return replace(FINE, plain=replace(ANSWER, trace=trace))


def repeated(**changes: Any) -> Observed:
    return replace(FINE, repeats=Repeats(replace(ANSWER, **changes), 10.0))


def described(role: str, **changes: Any) -> Observed:
    workers = tuple(
        replace(w, description=description(role, **changes)) if w.role == role else w
        for w in FINE.workers or ()
    )
    return replace(FINE, workers=workers)


def test_healthy_deployment_has_no_finding_but_facts() -> None:
    assert broken(FINE) == []
    assert {finding.rule: finding.value for finding in findings(FINE)} == {
        "answers": "demo, a prompt of 165 tokens",
        "workers": "decode 42, prefill f2",
        "pair": "1 of 1 fit",
        "versions": "trtllm-disagg 0.1.0, ai-dynamo 1.6.1, engine embedded",
        "order": "decode_first (always)",
        "both stages": "yes, prefill f2",
        "KV moved": "393,216 bytes",
        "KV events": "the router found 80% of the blocks after 0.3 s",
        "open files": "90 of 20000",
        "locked memory": "no RDMA here",
        "fs.inotify.max_user_instances": "at least 9 of 128 free",
        "/dev/shm": "64 MiB free",
        "ptrace_scope": "0",
    }


def test_a_request_that_failed_is_an_error_and_what_would_follow_from_it_is_left_out() -> None:
    seen = replace(FINE, plain=ProbeFailedError("503: no instance"), repeats=None)
    finding = the_one(seen)
    assert (finding.rule, finding.verdict) == ("answers", "error")
    assert finding.instead.startswith("503: no instance")
    assert not {"order", "both stages", "KV moved", "KV events"} & {each.rule for each in findings(seen)}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_missing_role_is_an_error(role: str) -> None:
    left = tuple(worker for worker in FINE.workers or () if worker.role != role)
    finding, pair = broken(replace(FINE, workers=left))
    assert (finding.rule, finding.verdict) == ("workers", "error")
    assert finding.instead == f"start a {role} worker, or look into its log"
    assert (pair.rule, pair.verdict) == ("pair", "not known")


def test_workers_that_all_do_not_answer_where_discovery_does_are_an_error() -> None:
    workers = tuple(replace(worker, description=None) for worker in FINE.workers or ())
    found = next(finding for finding in broken(replace(FINE, workers=workers)) if finding.rule == "workers")
    assert (found.verdict, found.instead.partition(":")[2]) == (
        "error",
        " listed, and without an answer; look into the log",
    )


def test_a_worker_that_is_listed_and_does_not_answer_is_an_error() -> None:
    dead = tuple(
        replace(w, description=None, process=None) if w.role == "prefill" else w for w in FINE.workers or ()
    )
    found = broken(replace(FINE, workers=dead))
    assert [(each.rule, each.verdict) for each in found] == [("workers", "error"), ("pair", "not known")]
    assert found[0].instead.startswith("prefill f2: listed, and without an answer")


def test_an_agg_deployment_needs_no_second_role_and_moves_no_kv() -> None:
    workers = (ObservedWorker(1, "agg", description("agg", strategy="agg"), PROCESS),)
    answer = replace(ANSWER, trace=AnswerTrace("agg", "default"))
    seen = replace(FINE, workers=workers, plain=answer)
    assert broken(seen) == []
    assert not {"KV moved", "pair"} & {finding.rule for finding in findings(seen)}


def test_a_frontend_without_a_list_leaves_the_workers_unknown() -> None:
    rules = {finding.rule: finding.verdict for finding in broken(replace(FINE, workers=None))}
    assert rules == {"workers": "not known", "pair": "not known", "versions": "not known"}


def test_two_workers_that_do_not_fit_are_an_error_that_names_the_setting() -> None:
    finding = the_one(described("decode", kv_dtype="fp8"))
    assert (finding.rule, finding.verdict) == ("pair", "error")
    assert "kv_cache_config.dtype: prefill 'same', decode 'fp8'" in finding.instead


def test_different_versions_are_a_note_and_missing_ones_not_known() -> None:
    newer = {"trtllm_disagg": "0.2.0", "ai_dynamo": "1.6.1"}
    finding = the_one(described("decode", versions=newer))
    assert (finding.rule, finding.verdict) == ("versions", "note")
    assert "decode 42: trtllm-disagg 0.2.0" in finding.value
    assert the_one(described("decode", versions=None)).verdict == "not known"


def test_workers_that_cannot_be_asked_are_not_known_with_the_reason() -> None:
    silent = tuple(replace(worker, description=None) for worker in FINE.workers or ())
    found = broken(replace(FINE, workers=silent, undescribed="discovery does not answer"))
    assert [(each.rule, each.verdict) for each in found] == [("pair", "not known"), ("versions", "not known")]
    assert all(each.instead.startswith("discovery does not answer") for each in found)


def test_a_request_that_took_another_way_is_an_error_with_the_way() -> None:
    lost = "local: no instance is there"
    found = broken(traced(fallbacks=[lost], prefill_instance=None, kv_transfer_bytes=None))
    assert [(each.rule, each.verdict) for each in found] == [("order", "error"), ("both stages", "error")]
    assert all(lost in each.instead for each in found)


def test_request_in_another_order_than_the_deployments_is_a_note() -> None:
    seen = traced(strategy="prefill_first", prefill_instance=None, decode_instance="42")
    finding = the_one(seen)
    assert (finding.rule, finding.verdict, finding.instead) == (
        "order",
        "note",
        "the workers say decode_first",
    )


def test_order_of_an_agg_worker_is_not_compared_with_its_unused_setting() -> None:
    alone = (ObservedWorker(1, "agg", description("agg", strategy="decode_first"), PROCESS),)
    seen = traced(strategy="agg", prefill_instance=None, kv_transfer_bytes=None)
    assert "order" not in {finding.rule for finding in broken(replace(seen, workers=alone))}


def test_local_request_is_a_note_when_an_ordered_one_crosses() -> None:
    stayed = traced(strategy="local", reason="short", prefill_instance=None, kv_transfer_bytes=None)
    finding = the_one(replace(stayed, ordered=ANSWER))
    assert (finding.rule, finding.verdict, finding.value) == ("order", "note", "local (short)")


def test_a_prompt_that_must_cross_and_does_not_is_an_error() -> None:
    stayed = traced(strategy="local", reason="no_peer", prefill_instance=None, kv_transfer_bytes=None)
    assert ("both stages", "error") in {
        (f.rule, f.verdict) for f in broken(replace(stayed, ordered=stayed.plain))
    }
    failed = replace(stayed, ordered=ProbeFailedError("503: no instance"))
    assert ("both stages", "error", "no answer") in {(f.rule, f.verdict, f.value) for f in broken(failed)}


def test_workers_of_another_project_leave_order_and_stages_unknown() -> None:
    found = broken(replace(FINE, plain=replace(ANSWER, trace=None)))
    assert [(each.rule, each.verdict) for each in found] == [
        ("order", "not known"),
        ("both stages", "not known"),
    ]


def test_two_workers_that_the_frontend_chained_are_both_stages() -> None:
    trace = AnswerTrace("router", "default", kv_transfer_bytes=1)
    seen = replace(FINE, plain=Answer(165, 0, 0.0, PREFILL_ID, DECODE_ID, trace))
    assert [f.value for f in findings(seen) if f.rule == "both stages"] == ["yes, prefill f2 and decode 42"]


def test_zero_kv_bytes_are_an_error_and_unmeasured_ones_not_known() -> None:
    finding = the_one(traced(kv_transfer_bytes=0))
    assert (finding.rule, finding.verdict) == ("KV moved", "error")
    finding = the_one(traced(kv_transfer_bytes=None))
    assert (finding.rule, finding.verdict) == ("KV moved", "not known")
    assert "--publish-metrics" in finding.instead


@pytest.mark.parametrize(
    ("cached", "told"), [(160, "--publish-kv-events"), (0, "kv_cache_config.enable_block_reuse: true")]
)
def test_router_without_kv_events_is_an_error(cached: int, told: str) -> None:
    finding = the_one(repeated(cached_tokens=cached, hit_rate=0.0))
    assert (finding.rule, finding.verdict) == ("KV events", "error")
    assert finding.instead.startswith(told)


def test_router_without_a_hit_rate_or_kv_events_is_a_note() -> None:
    finding = the_one(repeated(hit_rate=None))
    assert (finding.rule, finding.verdict) == ("KV events", "note")
    guessing = replace(FRONTEND, argv=(*FRONTEND.argv, "--no-router-kv-events"))
    assert the_one(replace(FINE, frontend=guessing)).value == "not used"


def test_a_frontend_elsewhere_leaves_every_limit_unknown() -> None:
    found = broken(replace(FINE, frontend=None, limits=None))
    assert {each.rule for each in found} == {
        "open files",
        "locked memory",
        "ptrace_scope",
        "/dev/shm",
        INOTIFY_KEY,
    }
    assert {each.verdict for each in found} == {"not known"}


@pytest.mark.parametrize(
    ("changes", "rule", "verdict"),
    [
        ({"free_inotify_instances": 2}, INOTIFY_KEY, "error"),
        ({"max_inotify_instances": None}, INOTIFY_KEY, "not known"),
        ({"free_shared_memory": MIB}, "/dev/shm", "note"),
        ({"ptrace_scope": 1}, "ptrace_scope", "note"),
    ],
)
def test_a_limit_that_is_too_low_is_named_with_what_helps(
    changes: dict[str, Any], rule: str, verdict: str
) -> None:
    finding = the_one(replace(FINE, limits=replace(LIMITS, **changes)))
    assert (finding.rule, finding.verdict) == (rule, verdict)
    assert verdict == "not known" or "sudo" in finding.instead


def test_open_files_are_those_of_the_running_processes() -> None:
    tight = replace(PROCESS, max_open_files=100)
    workers = tuple(replace(worker, process=tight) for worker in FINE.workers or ())
    finding = the_one(replace(FINE, workers=workers))
    assert (finding.rule, finding.verdict, finding.value) == ("open files", "error", "90 of 100")


def test_locked_memory_counts_where_there_is_rdma() -> None:
    little = replace(FINE, frontend=replace(FRONTEND, max_locked_memory=65536))
    assert broken(little) == []
    finding = the_one(replace(little, limits=replace(LIMITS, has_rdma=True)))
    assert (finding.rule, finding.verdict, finding.value) == ("locked memory", "note", "64 KiB")


def test_a_worker_on_another_host_is_named() -> None:
    workers = tuple(replace(worker, process=None) for worker in FINE.workers or ())
    finding = the_one(replace(FINE, workers=workers))
    assert (finding.rule, finding.verdict, finding.value) == (
        "other hosts",
        "not known",
        "decode 42, prefill f2",
    )
