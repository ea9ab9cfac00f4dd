"""What the clients hear of a step: tokens, ends, errors."""

from __future__ import annotations

import msgspec

from trtllm_disagg.embedded.ipc.messages import LogprobEntry, TokenOutput
from trtllm_disagg.embedded.scheduler.sequence import Sequence, Verdict
from trtllm_disagg.errors import DisaggError


class Outbox:
    def __init__(self) -> None:
        self._outputs: list[TokenOutput] = []

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def put(self, output: TokenOutput) -> None:
        self._outputs.append(output)

    def put_token(self, sequence: Sequence, output: TokenOutput) -> None:
        """At once, or with those that follow, where a request's client hears of every n-th token only. The first one
        and the end are never kept.
        """
        if (kept := sequence.kept) is not None:
            output, sequence.kept = merged(kept, output), None
        count = sequence.num_output
        if output.finish_reason is None and count > 1 and count % sequence.stream_interval:
            sequence.kept = output
        else:
            self._outputs.append(output)

    def put_cancel(self, sequence: Sequence) -> None:
        output = TokenOutput(
            sequence.request_id, sequence.index, finish_reason="cancelled", measured=sequence.measured
        )
        self.put_token(sequence, output)

    def put_error(self, request_id: int, error: DisaggError) -> None:
        self._outputs.append(TokenOutput(request_id, error=str(error), error_category=error.category))

    def take(self) -> list[TokenOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs


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
        measured=None if verdict.finish_reason is None else sequence.measured,
    )


def merged(earlier: TokenOutput, later: TokenOutput) -> TokenOutput:
    """Both in one; a stop word's trim counts from the end."""
    return msgspec.structs.replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=(earlier.logprobs or []) + (later.logprobs or []) or None,
        num_steps=earlier.num_steps + later.num_steps,
    )
