"""A frontend's pages and answers, over HTTP."""

from __future__ import annotations

import json
import socket

import psutil
import pytest

from tests.support.pages import Pages
from tests.unit.tools.doctor.conftest import status_of
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.top.frontend import (
    Answer,
    AnswerTrace,
    FrontendClient,
    ProbeFailedError,
    Sizes,
    environ_of_listener,
    fresh_prompt,
)
from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.tools.up.ports import free_http_port

#: As Dynamo 1.6.1 writes them.
ANSWER = {
    "usage": {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 96}},
    "nvext": {
        "worker_id": {
            "prefill_worker_id": 1,
            "prefill_dp_rank": 0,
            "decode_worker_id": 2,
            "decode_dp_rank": 0,
        },
        "engine_data": {
            "disagg": {
                "strategy": "decode_first",
                "reason": "always",
                "prefill_instance": "f2",
                "kv_transfer_ms": 1.9,
                "kv_transfer_bytes": 98304,
            }
        },
        "timing": {"ttft_ms": 23.8, "kv_hit_rate": 0.25},
    },
}
METRICS = """\
dynamo_frontend_model_kv_cache_block_size{model="demo"} 32
dynamo_frontend_model_context_length{model="demo"} 4096
"""
HEALTH = {
    "status": "healthy",
    "instances": [
        {
            "component": "decode",
            "endpoint": "generate",
            "namespace": "dynamo",
            "instance_id": 2**63 + 1,
            "transport": {"tcp": "127.0.0.1:34013/421f/dynamo/decode/generate"},
            "device_type": "cuda",
        }
    ],
}


def test_an_answer_is_read_as_dynamo_writes_it(pages: Pages) -> None:
    pages.pages["/v1/completions"] = (200, ANSWER)
    trace = AnswerTrace("decode_first", "always", [], "f2", None, 98304)
    answer = FrontendClient(pages.url, 5).ask("demo", "a b", ("disagg:auto",))
    assert answer == Answer(100, 96, 0.25, 1, 2, trace)
    (_, body) = pages.asked[0]
    assert (body["model"], body["prompt"], body["nvext"]["annotations"]) == ("demo", "a b", ["disagg:auto"])


def test_an_answer_without_more_is_all_unknown(pages: Pages) -> None:
    pages.pages["/v1/completions"] = (200, {"usage": {"prompt_tokens": 5}})
    assert FrontendClient(pages.url, 5).ask("demo", "a") == Answer(5, 0, None, None, None, None)


def test_a_model_that_is_served_as_chat_only_is_asked_so(pages: Pages) -> None:
    pages.pages["/v1/chat/completions"] = (200, ANSWER)
    assert FrontendClient(pages.url, 5).ask("demo", "a b").prompt_tokens == 100
    assert pages.asked[1][1]["messages"] == [{"role": "user", "content": "a b"}]


def test_http_error_of_the_frontend_is_raised_with_status_and_message(pages: Pages) -> None:
    pages.pages["/v1/completions"] = (503, {"message": "no instance", "code": 503})
    with pytest.raises(ProbeFailedError, match="503: no instance"):
        FrontendClient(pages.url, 5).ask("demo", "a")


def test_instances_and_sizes_are_read_or_unknown(pages: Pages) -> None:
    frontend = FrontendClient(pages.url, 5)
    assert (frontend.instances(), frontend.sizes("demo")) == (None, Sizes())
    pages.pages |= {"/health": (200, HEALTH), "/metrics": (200, METRICS)}
    (instance,) = frontend.instances() or []
    assert (instance.instance_id, instance.component) == (2**63 + 1, "decode")
    assert frontend.sizes("demo") == Sizes(32, 4096)
    assert frontend.sizes("other") == Sizes()


def test_a_prompt_fills_blocks_and_fits_the_model() -> None:
    assert len(fresh_prompt(Sizes(32, 4096)).split()) == 160
    assert len(fresh_prompt(Sizes(64, None)).split()) == 320
    assert len(fresh_prompt(Sizes(32, 100)).split()) == 48
    assert len(fresh_prompt(Sizes(10**9, None)).split()) == 1 << 14
    assert fresh_prompt(Sizes()) != fresh_prompt(Sizes())


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "nonsense", "http://h:99999", "http://h:abc"]
)
def test_invalid_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--url.*the URL of a frontend"):
        FrontendClient(url, 5)


def test_url_without_a_listener_exits_with_2_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--url", f"http://{LOOPBACK}:{free_http_port(LOOPBACK, 0)}") == 2
    assert "expected the URL of a frontend that answers ([Errno 111] " in capsys.readouterr().err


def test_server_that_is_no_frontend_exits_with_2_and_the_reason(
    pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    pages.pages["/v1/models"] = (200, "<html>")
    assert status_of("--url", pages.url) == 2
    assert "this server lists no models" in capsys.readouterr().err


DEEP = '{"x":' + "[" * 100_000


@pytest.mark.parametrize("id", ["\x1b[31mred", "\ud800", "two\nlines"])
def test_model_that_no_terminal_can_show_is_no_list_of_models(pages: Pages, id: str) -> None:
    pages.pages["/v1/models"] = (200, {"data": [{"id": id}]})
    with pytest.raises(ConfigError, match="this server lists no models"):
        FrontendClient(pages.url, 5).models()


def test_pages_of_a_server_that_is_no_frontend_are_refused_or_unknown(pages: Pages) -> None:
    frontend = FrontendClient(pages.url, 5)
    pages.pages |= dict.fromkeys(("/v1/models", "/health", "/v1/completions"), (200, DEEP))
    pages.pages["/metrics"] = (200, METRICS.replace("4096", "9" * 5000))
    with pytest.raises(ConfigError, match="this server lists no models"):
        frontend.models()
    assert (frontend.instances(), frontend.sizes("demo")) == (None, Sizes(32, None))
    with pytest.raises(ProbeFailedError, match="recursion"):
        frontend.ask("demo", "a")
    pages.pages["/v1/completions"] = (500, DEEP)
    with pytest.raises(ProbeFailedError, match=r'500: {"x":\['):
        frontend.ask("demo", "a")


def test_answers_that_end_too_early_are_failures(pages: Pages) -> None:
    pages.num_missing = 1
    pages.pages |= {"/v1/models": (200, {"data": []}), "/v1/completions": (500, {"message": "out of memory"})}
    frontend = FrontendClient(pages.url, 5)
    with pytest.raises(ConfigError, match="not completed"):
        frontend.models()
    with pytest.raises(ProbeFailedError, match="not completed"):
        frontend.ask("demo", "a")


def test_a_frontend_without_a_list_of_workers_leaves_them_not_known(
    pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    pages.pages["/v1/models"] = (200, {"data": [{"id": "demo"}]})
    pages.pages["/v1/completions"] = (200, ANSWER)
    assert status_of("--url", pages.url + "/v1/", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["model"], shown["errors"], shown["notes"], shown["not_known"]) == ("demo", 0, 0, 1)
    verdicts = {row["rule"]: row["verdict"] for row in shown["rows"]}
    assert verdicts.pop("workers") == "not known"
    assert verdicts == dict.fromkeys(("answers", "order", "both stages", "KV moved", "KV events"), "ok")


def test_a_listener_of_this_user_is_found_and_a_closed_port_is_not(pages: Pages) -> None:
    assert environ_of_listener(LOOPBACK, pages.server_port) == psutil.Process().environ()
    assert environ_of_listener("192.0.2.1", pages.server_port) == {}
    with socket.socket() as held:  # so that no other test listens there meanwhile
        held.bind((LOOPBACK, 0))
        assert environ_of_listener(LOOPBACK, held.getsockname()[1]) == {}


@pytest.mark.parametrize("argv", [["--decode-flags=--x"], ["a.yaml"], ["--url=http://h", "a.yaml", "b.yaml"]])
def test_doctor_with_one_worker_or_both_of_url_and_files_exits_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*argv) == 2
    assert "--url" in capsys.readouterr().err
