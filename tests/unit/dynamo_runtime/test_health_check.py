"""What Dynamo's health probes send, as it is given to its runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_disagg.dynamo_runtime.handler import PROBE, health_check_payload
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.wire.bodies import decode_request

GIVEN = '{"token_ids": [5], "stop_conditions": {"max_tokens": 2}}'
READ = {"token_ids": [5], "stop_conditions": {"max_tokens": 2}, PROBE: True}


def test_without_one_a_probe_is_one_token_before_all_others() -> None:
    payload = health_check_payload(None)
    request = decode_request(payload)
    assert (len(request.token_ids), request.stop.max_tokens, request.priority) == (1, 1, 1.0)
    assert payload[PROBE] is True


def test_health_check_payload_is_read_from_json_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text(GIVEN)
    assert health_check_payload(GIVEN) == health_check_payload(f"@{tmp_path}/probe.json") == READ


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{", "JSON, or @FILE"),
        pytest.param("[" * 100_000, "JSON, or @FILE", id="too deep"),
        ("[1]", "a JSON object"),
        ("@~no_such_user/probe.json", "No such file"),
        ("@/nowhere/probe.json", "No such file"),
        ('{"prompt": "Hello"}', "token_ids"),
        ('{"token_ids": [1], "token_ids": [2]}', "token_ids is there twice"),
        ('{"token_ids": [1], "stop_conditions": {"max_tokens": "1"}}', "max_tokens"),
        (r'{"token_ids": [1], "routing": {"cache_salt": "\ud800"}}', "surrogates not allowed"),
    ],
)
def test_invalid_health_check_payload_is_refused_by_the_flags_name(given: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^--health-check-payload: .*{why}"):
        health_check_payload(given)
