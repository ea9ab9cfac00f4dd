"""How long the stages of one choice take and what its KV costs, for who asks (`return_perf_metrics`)."""

from __future__ import annotations

import time

from trtllm_disagg.embedded.messages import Admission, Measured


class Unmeasured:
    """For who does not."""

    def scheduled(self, step: int) -> None:
        """It is in this step of the engine."""

    def has_token(self, step: int) -> None:
        """One more."""

    def transfer_began(self) -> None:
        """Its KV is asked for."""

    def transfer_ended(self, num_bytes: int) -> None:
        """Its KV is here; so many bytes came."""

    def told(self, admission: Admission) -> Measured | None:
        """What is known by now."""
        return None


class Measuring(Unmeasured):
    def __init__(self, arrived: float) -> None:
        """`arrived`: by the monotonic clock."""
        self._measured = Measured(arrived)

    def scheduled(self, step: int) -> None:
        measured = self._measured
        if measured.first_step is None:
            measured.first_step = step
            measured.first_scheduled = measured.first_scheduled or time.monotonic()

    def has_token(self, step: int) -> None:
        measured = self._measured
        measured.last_token, measured.last_step = time.monotonic(), step
        measured.first_token = measured.first_token or measured.last_token

    def transfer_began(self) -> None:
        self._measured.transfer_start = time.monotonic()

    def transfer_ended(self, num_bytes: int) -> None:
        # Until now it has waited: its first token may be there before its first step.
        measured = self._measured
        measured.transfer_end = measured.first_scheduled = time.monotonic()
        measured.transfer_bytes = num_bytes

    def told(self, admission: Admission) -> Measured | None:
        self._measured.admission = admission
        return self._measured


UNMEASURED = Unmeasured()
