"""What `bench engine` starts as contestants in its tests, each in a process of its own."""

from __future__ import annotations

import os
import time
from typing import Any


class Fake:
    def __init__(self, start: Any) -> None:
        print("noise", flush=True)

    def prefill(self, prompt: list[int]) -> float:
        return 0.5

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        return [0.25] * steps

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return [[7] * tokens for _ in prompts]

    def read(self) -> float:
        return 10.0

    def multiply(self) -> float:
        return 20.0

    def burn(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def fail(self) -> None:
        raise ValueError("out of luck")

    def die(self) -> None:
        os._exit(3)

    def close(self) -> None:
        pass


class Failing(Fake):
    """Fails at batch 4, from the third time on."""

    def __init__(self, start: Any) -> None:
        super().__init__(start)
        self._times = 0

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        self._times += len(prompts) == 4
        if self._times > 2:
            self.fail()
        return super().decode(prompts, steps)
