"""Writes the synthetic trace that the page which-strategy replays, in Mooncake's format: conversations of a few
applications, each with its own long prompt. Every turn's prompt begins with the one before it.
"""

from __future__ import annotations

import json
import random
from itertools import count
from operator import itemgetter
from pathlib import Path

#: Tokens that one hash of the format stands for.
_BLOCK = 512
_APPLICATIONS, _CONVERSATIONS, _TURNS = 3, 48, 4
#: Blocks of an application's prompt, and blocks that a turn adds.
_APPLICATION_BLOCKS, _TURN_BLOCKS = (2, 6), (1, 3)
_ANSWERS = (60, 360)
#: Mean time between two conversations, and between two turns of one.
_PAUSE_MS, _THINKING_MS = 2_000, 9_000


def write_trace(file: Path) -> None:
    """Writes the trace, the same each time."""
    dice, hashes = random.Random("which strategy"), count()
    applications = [
        [next(hashes) for _ in range(dice.randint(*_APPLICATION_BLOCKS))] for _ in range(_APPLICATIONS)
    ]
    lines, begin = [], 0.0
    for _ in range(_CONVERSATIONS):
        blocks, now = list(dice.choice(applications)), begin
        for _ in range(_TURNS):
            blocks += [next(hashes) for _ in range(dice.randint(*_TURN_BLOCKS))]
            # The last block is partly filled.
            tokens = len(blocks) * _BLOCK - dice.randrange(_BLOCK)
            line = {
                "timestamp": round(now),
                "input_length": tokens,
                "output_length": dice.randint(*_ANSWERS),
                "hash_ids": list(blocks),
            }
            lines.append((now, line))
            now += dice.expovariate(1 / _THINKING_MS)
        begin += dice.expovariate(1 / _PAUSE_MS)
    lines.sort(key=itemgetter(0))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(line)}\n" for _, line in lines), encoding="utf-8")
