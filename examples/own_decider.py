"""Your own decider: sends long answers to a decode worker, and keeps short ones on the prefill worker.

    python examples/own_decider.py --model .cache/demo-model --disaggregation-mode prefill \
        --disaggregation-strategy prefill_first --prefill-decider long_answer --long-answer-tokens 64

Takes the flags of `trtllm-disagg worker`. The field adds a flag, a variable and a flag of `set`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from trtllm_disagg.config.deciders import DECIDERS, Decision, Facts
from trtllm_disagg.config.settings import NUMBER, option


@dataclass(frozen=True, slots=True)
class LongAnswer:
    long_answer_tokens: int = option(
        128, "long_answer: answers longer than this are decoded remotely", NUMBER
    )

    def decide(self, facts: Facts) -> Decision:
        is_long = facts.max_total_tokens - facts.num_prompt > self.long_answer_tokens
        return Decision(is_long, "long_answer" if is_long else "short_answer")


# First, because flags are made from this table.
DECIDERS["long_answer"] = LongAnswer

if __name__ == "__main__":
    from trtllm_disagg.common.cli import main

    main(["worker", *sys.argv[1:]])
