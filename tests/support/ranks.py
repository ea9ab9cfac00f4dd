"""For the tests of tensor parallelism: several schedules of the same prompts, and the logits of every token.

As a program, a rank of a job: `mpiexec -n 2 python -m tests.support.ranks ANSWERS KIND...`. A kind is `family-forward`,
with its checkpoint in the folder FAMILY beside ANSWERS. Rank 0 writes its logits, also of handoffs between other
numbers of ranks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.support.cores import Core
from trtllm_disagg.engines.embedded.core import build as core_module
from trtllm_disagg.engines.embedded.kv_transfer.transports import TRANSPORTS
from trtllm_disagg.engines.embedded.model import sampler
from trtllm_disagg.engines.embedded.tensor_parallel.follower import follow
from trtllm_disagg.engines.embedded.tensor_parallel.group import join_as_follower, join_as_leader, leave
from trtllm_disagg.engines.embedded.tensor_parallel.launch import own_rank
from trtllm_disagg.engines.embedded.tensor_parallel.team import Team

NEW_TOKENS = 8
STEM = [2 + (i * 17 + i * i) % 250 for i in range(80)]
#: Two share a stem that is no whole number of tiles; Mistral's window is 40 tokens.
PROMPTS = [
    [3],
    STEM + [9] * 53,
    [*STEM, 11, 12, 13],
    [5 + i % 7 for i in range(32)],
    [200 - i for i in range(97)],
]
BACKENDS = tuple(TRANSPORTS)

#: (prompt, position) -> logits
Logits = dict[tuple[int, int], torch.Tensor]
#: schedule -> logits
Answers = dict[str, Logits]
MakeCore = Callable[..., Core]


class Recorder:
    """Keeps each sampled row of logits of these prompts until it is taken."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self._prompts = prompts
        self._rows: Logits = {}

    def sample(self, logits: torch.Tensor, sequences: Sequence[Any]) -> Any:
        for row, sequence in zip(logits, sequences, strict=True):
            prompt = sequence.tokens[: sequence.num_prompt]
            if prompt in self._prompts:
                self._rows[self._prompts.index(prompt), len(sequence.tokens)] = row.clone()
        return sampler.sample(logits, sequences)

    def take(self) -> Logits:
        rows, self._rows = self._rows, {}
        return rows


@contextmanager
def recording() -> Iterator[Callable[[], Logits]]:
    recorder = Recorder(PROMPTS)
    core_module.sample = recorder.sample  # type: ignore[attr-defined]
    yield recorder.take
    core_module.sample = sampler.sample  # type: ignore[attr-defined]


#: Number of answers of record_all.
_ENGINES = 2


def record_all(make_core: MakeCore) -> Answers:
    """Run the prompts one by one, together with cached prefixes, and in chunks."""
    answers: Answers = {}
    with recording() as take:
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
        # Alone, so that some steps have only a chunk that samples nothing.
        chunked.generate(PROMPTS[1], NEW_TOKENS)
        chunked.run(*(chunked.add(prompt, NEW_TOKENS) for prompt in PROMPTS))
        answers["chunked"] = take()
        chunked.close()
    return answers


def record_handoffs(make_alone: MakeCore, make_team: MakeCore) -> Answers:
    """Prefill in one engine, decode in another, together and with a part of the prompt in both caches."""
    answers: Answers = {}
    for backend in BACKENDS:
        settings: dict[str, Any] = {
            "cache_transceiver_config": {"backend": backend},
            "kv_cache_config": {"max_tokens": 1024, "tokens_per_block": 16},
        }
        alone, team, other = make_alone(**settings), make_team(**settings), make_team(**settings)
        with recording() as take:
            for name, prefill, decode in (
                ("1 to 2", alone, team),
                ("2 to 1", team, alone),
                ("2 to 2", team, other),
            ):
                handoffs = [prefill.prefill(prompt) for prompt in PROMPTS]
                pairs = zip(PROMPTS, handoffs, strict=True)
                decode.run(*(decode.add_decode(prompt, handoff, NEW_TOKENS) for prompt, handoff in pairs))
                prefill.settle()
                answers[f"{name} by {backend}"] = take()
        for core in (alone, team, other):
            core.assert_idle()
            core.close()
    return answers


def lead(path: Path, kinds: list[str]) -> None:
    def core(kind: str, **args: Any) -> Core:
        family, _, forward = kind.partition("-")
        return Core(path.parent / family, embedded={"forward": forward}, **args)

    def core_of_two(kind: str, **args: Any) -> Core:
        team = Team(*join_as_leader(2, sys.exit), sys.exit)
        return core(kind, team=team, tensor_parallel_size=2, **args)

    answers = {kind: record_all(lambda kind=kind, **args: core_of_two(kind, **args)) for kind in kinds}
    answers["handoffs"] = record_handoffs(
        lambda **args: core(kinds[0], **args), lambda **args: core_of_two(kinds[0], **args)
    )
    torch.save(answers, path)


def serve(kinds: list[str]) -> None:
    for _ in range(_ENGINES * len(kinds)):
        follow(*join_as_follower())
    for _ in BACKENDS:
        both = [threading.Thread(target=follow, args=join_as_follower())]
        both[0].start()
        both.append(threading.Thread(target=follow, args=join_as_follower()))
        both[1].start()
        for engine in both:
            engine.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if own_rank():
        serve(sys.argv[2:])
    else:
        lead(Path(sys.argv[1]), sys.argv[2:])
    leave()
