"""What comes in a handoff is looked at before an engine sees it."""

from __future__ import annotations

from typing import Any

import pytest

from trtllm_disagg.engines.embedded import DisaggregatedParams
from trtllm_disagg.errors import HandoffRefusedError
from trtllm_disagg.types import PrefillResult
from trtllm_disagg.wire.bodies import decode_disaggregated_params


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("opaque_state", 10**12),
        ("opaque_state", [1]),
        ("first_gen_tokens", {"a": 1}),
        ("first_gen_tokens", 5),
        ("first_gen_tokens", ["a"]),
        ("first_gen_tokens", [True]),
        ("draft_tokens", [1.5]),
        ("draft_tokens", [2**31]),
        ("ctx_request_id", "7"),
        ("ctx_request_id", True),
        ("disagg_request_id", 2**63),
        ("ctx_dp_rank", "0"),
        ("ctx_info_endpoint", ["tcp://a", "tcp://b"]),
        ("ctx_info_endpoint", {"a": 1}),
        ("first_gen_log_probs", [[{"token_id": "a", "logprob": 0.5, "rank": 1}]]),
    ],
)
def test_a_field_of_another_type_is_refused_by_its_name(field: str, value: Any) -> None:
    """Bytes of a number are that many bytes: a worker could be made to take all memory."""
    given = {"opaque_state": "AAAA", "first_gen_tokens": [5], field: value}
    with pytest.raises(HandoffRefusedError, match=field):
        decode_disaggregated_params(PrefillResult(given), DisaggregatedParams, None)
