"""Estimates from the modelled engines' own tables how long a worker takes for a request. Used to plan a run, never for
a result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_disagg.bench.strategies.records import NOMINAL, Arm, Sensitivity
from trtllm_disagg.bench.strategies.workloads import Shape
from trtllm_disagg.modelled.build import Gpus, num_kv_blocks, open_gpus
from trtllm_disagg.modelled.config import ModelledArgs
from trtllm_disagg.modelled.factors import Factors
from trtllm_disagg.modelled.step_times import Chunk

#: Iterations after which the batch size and the time of a request are consistent.
_ROUNDS = 8
#: Answers took up to 1.3 times `loaded_seconds`, because they also wait for prefills of other requests.
_MOST_DELAY = 1.3


@dataclass(frozen=True, slots=True)
class ModelledWorker:
    """The step times and limits of one modelled engine."""

    gpus: Gpus
    max_batch: int
    max_step_tokens: int
    pool_tokens: int
    #: Factors on all step times, as on a side of the sensitivity band.
    factors: Sensitivity = NOMINAL
    #: The client gets the first token, then one output every `stream_interval` tokens, and the end.
    stream_interval: int = 1

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> ModelledWorker:
        """`arguments`: those of LLM(...). Raises ConfigError for what no table covers."""
        args = ModelledArgs.model_validate(arguments)
        gpus = open_gpus(args)
        pool = num_kv_blocks(args, gpus) * args.kv_cache_config.tokens_per_block
        return cls(gpus, args.max_batch_size, args.max_num_tokens, pool, stream_interval=args.stream_interval)

    def prefill_seconds(self, shape: Shape) -> float:
        """Seconds to compute the prompt tokens that are not cached, in chunks."""
        prompt = round(shape.input_tokens)
        # The last token is always computed.
        done, seconds = min(round(shape.cached_tokens), prompt - 1), 0.0
        while done < prompt:
            chunk = min(prompt - done, self.max_step_tokens)
            seconds += self.step_seconds([Chunk(chunk, done)], 0, 0)
            done += chunk
        return seconds

    def decode_seconds(self, shape: Shape) -> float:
        """A request's share of the decode steps, in the largest batch that the pool holds."""
        batch = self._largest_batch(shape)
        return self._steps_seconds(shape, batch) / batch

    def isolated_seconds(self, shape: Shape) -> float:
        """Seconds of a lone request."""
        return self.prefill_seconds(shape) + self._steps_seconds(shape, 1)

    def loaded_seconds(self, shape: Shape, rate: float) -> float:
        """Seconds of a request at `rate` requests a second: as many run at once as arrive during one answer."""
        seconds, most = self.isolated_seconds(shape), self._largest_batch(shape)
        for _ in range(_ROUNDS):
            batch = max(1, min(most, round(rate * seconds)))
            seconds = self.prefill_seconds(shape) + self._steps_seconds(shape, batch)
        return seconds

    def _largest_batch(self, shape: Shape) -> int:
        return max(1, min(self.max_batch, int(self.pool_tokens / (shape.input_tokens + shape.output_tokens))))

    def _steps_seconds(self, shape: Shape, batch: int) -> float:
        """Seconds of all decode steps of an answer, in a batch of such requests."""
        context = shape.input_tokens + shape.output_tokens / 2
        return self.step_seconds((), batch, round(context)) * shape.output_tokens

    def step_seconds(self, chunks: Sequence[Chunk], num_decode: int, context: int) -> float:
        parts = self.gpus.times.parts(chunks, num_decode, context)
        factors = Factors(self.factors.prefill_factor, self.factors.decode_factor)
        return parts.seconds(sum(chunk.tokens for chunk in chunks), num_decode, factors)

    def sending_seconds(self, shape: Shape) -> float:
        """Seconds to move a prompt's KV over the link."""
        facts = self.gpus.facts
        return (
            shape.input_tokens * facts.kv_bytes_per_token / facts.link_bytes_per_second / self.gpus.num_ranks
        )


def capacity(arm: Arm, shape: Shape, workers: Mapping[str, ModelledWorker]) -> float:
    """The approximate requests a second that an arm sustains, if each prefill runs alone. `workers` by role."""
    if arm.agg_workers:
        worker = workers["agg"]
        return arm.agg_workers / (worker.prefill_seconds(shape) + worker.decode_seconds(shape))
    prefill, decode = workers["prefill"], workers["decode"]
    sending = prefill.sending_seconds(shape)
    return min(
        arm.prefill_workers / max(prefill.prefill_seconds(shape), sending),
        arm.decode_workers / max(decode.decode_seconds(shape), sending),
    )


def requests_to_fill(arm: Arm, shape: Shape, workers: Mapping[str, ModelledWorker], rate: float) -> int:
    """The requests that arrive during somewhat more than two answers: only then do as many end as arrive, and a queue
    shows.
    """
    role, count = ("agg", arm.agg_workers) if arm.agg_workers else ("decode", arm.decode_workers)
    return math.ceil(2 * _MOST_DELAY * rate * workers[role].loaded_seconds(shape, rate / count))
