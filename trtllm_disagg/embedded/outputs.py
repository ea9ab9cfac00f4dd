"""What the client hears: of a token, of an end, of an error."""

from __future__ import annotations

from trtllm_disagg.embedded.messages import LogprobEntry, TokenOutput
from trtllm_disagg.embedded.sequence import Sequence
from trtllm_disagg.embedded.stopping import Verdict
from trtllm_disagg.errors import DisaggError


def of_token(sequence: Sequence, token: int, logprobs: LogprobEntry | None, verdict: Verdict) -> TokenOutput:
    return TokenOutput(
        sequence.request_id,
        sequence.index,
        token_ids=[token] if verdict.emit else [],
        logprobs=[logprobs] if verdict.emit and logprobs else None,
        trim=verdict.trim,
        finish_reason=verdict.finish_reason,
        stop_reason=verdict.stop_reason,
        cached_tokens=sequence.num_cached,
        measured=None if verdict.finish_reason is None else sequence.measuring.told(),
    )


def of_cancel(sequence: Sequence) -> TokenOutput:
    measured = sequence.measuring.told()
    return TokenOutput(sequence.request_id, sequence.index, finish_reason="cancelled", measured=measured)


def of_error(request_id: int, error: DisaggError) -> TokenOutput:
    return TokenOutput(request_id, error=str(error), error_category=error.category)
