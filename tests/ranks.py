"""What the tests of tensor parallelism run: several schedules of the same prompts, and the logits of every token.

As a program, one of the ranks of a job: `mpiexec -n 2 python -m tests.ranks ANSWERS KIND...`, where a kind is
`family-forward` and its checkpoint is in the folder FAMILY beside ANSWERS. Rank 0 writes what it got.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.cores import Core
from trtllm_disagg.embedded import core as core_module
from trtllm_disagg.embedded import sampler

NEW_TOKENS = 8
STEM = [2 + (i * 17 + i * i) % 250 for i in range(80)]
#: Two have a stem in common, of no whole number of tiles; Mistral's window is 40 tokens.
PROMPTS = [
    [3],
    STEM + [9] * 53,
    [*STEM, 11, 12, 13],
    [5 + i % 7 for i in range(32)],
    [200 - i for i in range(97)],
]

#: That record_all makes.
_ENGINES = 2
#: (prompt, position) -> logits
Logits = dict[tuple[int, int], torch.Tensor]
#: schedule -> logits
Answers = dict[str, Logits]
MakeCore = Callable[..., Core]


def record_all(make_core: MakeCore) -> Answers:
    """The prompts one by one, all together, in chunks, and with their prefixes in the cache."""
    rows: Logits = {}
    original = sampler.sample

    def record(logits: torch.Tensor, sequences: Sequence[Any]) -> Any:
        for row, sequence in zip(logits, sequences, strict=True):
            prompt = sequence.tokens[: sequence.num_prompt]
            rows[PROMPTS.index(prompt), len(sequence.tokens)] = row.clone()
        return original(logits, sequences)

    def take() -> Logits:
        taken = dict(rows)
        rows.clear()
        return taken

    core_module.sample = record  # type: ignore[attr-defined]
    try:
        answers: Answers = {}
        whole = make_core(kv_cache_config={"max_tokens": 1024})
        for prompt in PROMPTS:
            whole.generate(prompt, NEW_TOKENS)
        answers["solo"] = take()
        whole.run(*(whole.add(prompt, NEW_TOKENS) for prompt in PROMPTS))
        answers["reused"] = take()
        whole.close()
        chunked = make_core(
            kv_cache_config={"max_tokens": 1024, "enable_block_reuse": False},
            max_num_tokens=64,
            enable_chunked_prefill=True,
        )
        chunked.run(*(chunked.add(prompt, NEW_TOKENS) for prompt in PROMPTS))
        answers["chunked"] = take()
        chunked.close()
    finally:
        core_module.sample = original  # type: ignore[attr-defined]
    return answers


def main(path: Path, kinds: list[str]) -> None:
    from trtllm_disagg.embedded.parallel.follower import follow
    from trtllm_disagg.embedded.parallel.join import join_as_follower, join_as_leader, leave, own_rank
    from trtllm_disagg.embedded.parallel.team import Team

    torch.set_num_threads(1)
    if own_rank():
        for _ in range(_ENGINES * len(kinds)):
            follow(*join_as_follower())
        leave()
        return
    answers: dict[str, Answers] = {}
    for kind in kinds:
        family, _, forward = kind.partition("-")

        def make_core(family: str = family, forward: str = forward, **args: Any) -> Core:
            group, peers = join_as_leader(path.parent, 2, sys.exit)
            team = Team(group, peers, sys.exit)
            return Core(
                path.parent / family, team=team, tensor_parallel_size=2, embedded={"forward": forward}, **args
            )

        answers[kind] = record_all(make_core)
    torch.save(answers, path)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
