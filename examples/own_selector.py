"""Your own selector: keeps a conversation on one worker while that worker is there.

    python examples/own_selector.py --model .cache/demo-model --disaggregation-mode decode \
        --disaggregation-strategy decode_first --next-router random

Takes the flags of `trtllm-disagg worker`. Replaces `random`; for a name of its own, add it to
`WorkerConfig.next_router`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

from trtllm_disagg.handlers.selection import SELECTORS
from trtllm_disagg.types import GenerateRequest

#: All turns of a conversation begin alike.
FIRST_TOKENS = 32


class Sticky:
    """Rendezvous hashing: when an instance leaves, only its own conversations move."""

    async def choose(self, request: GenerateRequest, candidates: Sequence[int]) -> int:
        start = repr(list(request.token_ids[:FIRST_TOKENS]))
        return max(candidates, key=lambda each: hashlib.sha256(f"{each} {start}".encode()).digest())


SELECTORS["random"] = lambda in_flight, overlaps: Sticky()

if __name__ == "__main__":
    from trtllm_disagg.common.cli import main

    main(["worker", *sys.argv[1:]])
