"""The requests that an LLM waits for, and who hears what of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from trtllm_disagg.embedded.messages import TokenOutput
from trtllm_disagg.embedded.result import RequestError, RequestOutput, wake


class RunningRequests:
    """`add` and `fail_all` from any thread, `deliver` from the one thread that has to tell of a request."""

    def __init__(self) -> None:
        self._results: dict[int, RequestOutput] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._results)

    def add(self, result: RequestOutput) -> None:
        with self._lock:
            self._results[result.request_id] = result

    def deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """To those that still run; who has all that is due is forgotten."""
        delivered: list[RequestOutput] = []
        for output in outputs:
            if (result := self._results.get(output.request_id)) is None:
                continue
            if output.finish_reason is not None or output.error is not None:
                self._forget_when_done(result, output)
            result.deliver(output)
            delivered.append(result)
        wake(delivered)

    def fail_all(self, reason: str) -> None:
        """There is no engine any more."""
        with self._lock:
            results, self._results = list(self._results.values()), {}
        for result in results:
            result.deliver(RequestError(reason, "Unavailable"))
        wake(results)

    def _forget_when_done(self, result: RequestOutput, output: TokenOutput) -> None:
        result.choices_left -= 1
        if result.choices_left == 0 or output.error is not None:
            self._results.pop(output.request_id, None)
