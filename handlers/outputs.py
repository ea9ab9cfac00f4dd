"""RequestOutput of the LLM API (cumulative) -> TokenChunk (what is new)."""

from __future__ import annotations

from typing import Any

from trtllm_disagg.errors import StageTimeoutError
from trtllm_disagg.types import TokenChunk, Usage


class OutputCursor:
    """Reads one choice of one RequestOutput, and remembers how far."""

    def __init__(self, num_prompt: int, *, skip: int = 0, cached_tokens: int | None = None) -> None:
        """`skip` tokens have reached the client already; `cached_tokens` wins over this engine's count."""
        self._num_prompt = num_prompt
        self._position = skip
        self._cached_tokens = cached_tokens

    def advance(self, result: Any) -> TokenChunk | None:
        """What came since the last call, None when nothing did. Raises StageTimeoutError."""
        output = result.outputs[0]
        tokens = output.token_ids[self._position :]
        finish_reason = output.finish_reason
        if finish_reason == "timeout":  # Dynamo's frontend has no such end
            raise StageTimeoutError("the engine ran out of time for this request")
        if not tokens and finish_reason is None:
            return None
        log_probs, top_logprobs = self._logprobs(output, tokens)
        self._position += len(tokens)
        return TokenChunk(
            token_ids=list(tokens),
            index=output.index,
            log_probs=log_probs,
            top_logprobs=top_logprobs,
            finish_reason=finish_reason,
            stop_reason=output.stop_reason if finish_reason else None,
            completion_usage=self._usage(result, output) if finish_reason else None,
        )

    def _usage(self, result: Any, output: Any) -> Usage:
        cached = self._cached_tokens if self._cached_tokens is not None else result.cached_tokens
        return Usage.of(self._num_prompt, len(output.token_ids), cached or 0)

    def _logprobs(
        self, output: Any, tokens: list[int]
    ) -> tuple[list[float] | None, list[list[dict[str, Any]]] | None]:
        """None when one is missing: a shorter list would be read as the logprobs of other tokens."""
        entries = (output.logprobs or [])[self._position : self._position + len(tokens)]
        if not tokens or len(entries) < len(tokens):
            return None, None
        if isinstance(entries[0], float):  # TensorRT-LLM, when nobody asked for alternatives
            return list(entries), None
        if any(token not in entry for token, entry in zip(tokens, entries, strict=True)):
            return None, None
        chosen = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
        top = [
            [
                {"rank": lp.rank or 0, "token_id": token, "token": None, "logprob": lp.logprob}
                for token, lp in entry.items()
            ]
            for entry in entries
        ]
        return chosen, top
