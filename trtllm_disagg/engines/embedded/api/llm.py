"""LLM: TensorRT-LLM's LLM API on the embedded engine.

The model runs in a process of its own; this object validates, sends, and hands tokens to the task that iterates.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from trtllm_disagg.engines.embedded.api import request as checks
from trtllm_disagg.engines.embedded.api.images import (
    MAX_PIXEL_BYTES,
    InputProcessor,
    place_images,
    with_pictures,
)
from trtllm_disagg.engines.embedded.api.result import Feed, RequestOutput, RunningRequests, decoder
from trtllm_disagg.engines.embedded.core.core_client import CoreClient
from trtllm_disagg.engines.embedded.ipc.messages import AbortRequest, AddRequest, StepReport, TokenOutput
from trtllm_disagg.engines.embedded.ipc.sockets import MAX_BACKLOG_BYTES
from trtllm_disagg.engines.embedded.params.llm_args import (
    LlmArgs,
    as_plain,
    core_args,
    in_directory,
    refuse_unsupported,
)
from trtllm_disagg.engines.embedded.params.model_shape import check_model
from trtllm_disagg.engines.embedded.params.request_params import (
    DisaggregatedParams,
    SamplingParams,
    SchedulingParams,
)
from trtllm_disagg.engines.embedded.tensor_parallel.launch import require_divides, serve_as_rank
from trtllm_disagg.errors import OverloadedError
from trtllm_disagg.wire.kv_handle import VERSION as HANDLE_VERSION

log = logging.getLogger(__name__)

DEFAULT_REQUEST_PRIORITY = 0.5
_FLUSH_SECONDS = 10.0


def _one_by_one(arguments: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    for name, value in arguments.items():
        if isinstance(value, list) and len(value) != count:
            raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
    for i in range(count):
        yield {name: value[i] if isinstance(value, list) else value for name, value in arguments.items()}


class LLM:
    """Loads the checkpoint directory `model`. Raises pydantic's ValidationError for unknown or wrong arguments,
    ConfigError for what the embedded engine does not serve or cannot read. Under mpiexec, ranks other than 0 serve
    rank 0's engine until it ends, then raise SystemExit.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: Literal["auto", "slow"] = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.args = self._read_args(
            model=model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            **{name: as_plain(value) for name, value in kwargs.items()},
        )
        self._num_active = 0
        self._running = RunningRequests()
        self._ids = itertools.count(1)
        self._events = Feed(self.args.kv_cache_config.event_buffer_max_size)
        self._stats = Feed(None if self.args.max_stats_len < 0 else self.args.max_stats_len)
        self._fatal_error: BaseException | None = None
        self._shut_down = False
        self._core = self._start_core()

    # -- what clients call

    #: `abort` of a finished context_only request frees its KV (embedded engine only).
    releases_handoffs = True
    #: A RequestError has a `category` (embedded engine only).
    names_errors = True

    @property
    def num_active_requests(self) -> int:
        """Waiting and running requests, and prompts with held KV, as of the last step (embedded engine only)."""
        return self._num_active

    @property
    def max_seq_len(self) -> int:
        """Maximum tokens of a prompt and its answer together (embedded engine only)."""
        return self._core.ready.max_seq_len

    def preprocess(self, inputs: Any, sampling_params: Any = None, disaggregated_params: Any = None) -> Any:
        """The slow part of `generate_async`, which takes the result as `inputs`. Thread-safe."""
        self._core.flush(_FLUSH_SECONDS)  # or a burst of images would be refused
        return with_pictures(inputs)

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,
        scheduling_params: SchedulingParams | None = None,
        conversation_params: Any = None,
        cache_salt: str | None = None,
        priority: float = DEFAULT_REQUEST_PRIORITY,
    ) -> RequestOutput:
        """Start a request and return at once. Raises ValueError, TypeError or NotImplementedError for invalid
        arguments; if the request fails later, iterating raises RequestError.
        """
        arrived = self._now()
        if reason := self._ended():
            raise RuntimeError(f"LLM is shutting down ({reason})")
        adapters = {"lora_request": lora_request, "prompt_adapter_request": prompt_adapter_request}
        for name, given in adapters.items():
            if given is not None:
                raise NotImplementedError(f"{name} is not served by the embedded engine")
        if not 0.0 <= priority <= 1.0:
            raise ValueError(f"priority must be in [0, 1], got {priority}")
        sampling = sampling_params or SamplingParams()
        text, prompt = checks.prompt_of(inputs, lambda t: self._tokenize(t, sampling.add_special_tokens))
        kind = checks.request_type_of(disaggregated_params, self._core.ready.transport != "off")
        hashes = disaggregated_params.multimodal_hashes if disaggregated_params else None
        placed = place_images(prompt, inputs, hashes, kind, self._core.ready.image_tokens)
        detokenize = self._detokenizer(sampling)
        if placed.pixels and text is None and detokenize is not None:
            # As most of TensorRT-LLM's processors. Dynamo's decode reads a handoff's tokens only beside a text.
            text = self.tokenizer.decode(prompt)
        prompt = placed.token_ids
        checks.check_prompt(prompt, self._core.ready)
        if kind != "generation_only" and not self.args.enable_chunked_prefill:
            checks.check_fits_a_step(prompt, self.args.max_num_tokens)
        if sampling.n > self.args.max_batch_size:
            raise ValueError(
                f"SamplingParams.n={sampling.n} is more than max_batch_size {self.args.max_batch_size}"
            )
        if kind != "context_and_generation" and sampling.n != 1:
            raise ValueError(f"SamplingParams.n={sampling.n}: a {kind} request has exactly one choice")
        spec = checks.sampling_spec(
            sampling,
            num_prompt=len(prompt),
            request_type=kind,
            ready=self._core.ready,
            end_ids=self._end_ids(sampling),
            tokenize=self._tokenize,
            guided_backend=self.args.guided_decoding_backend,
        )
        handoff, rendezvous = checks.other_half(disaggregated_params, kind, self._core.ready)
        if placed.images:
            checks.check_serves_images(spec, rendezvous)
        request = checks.as_received(
            AddRequest(
                request_id=next(self._ids),
                prompt=[],
                sampling=spec,
                request_type=kind,
                num_choices=sampling.n,
                priority=priority,
                cache_salt=cache_salt or "",
                handoff=handoff,
                rendezvous=rendezvous,
                arrived=arrived if sampling.return_perf_metrics or self.args.return_perf_metrics else None,
                stream_interval=self.args.stream_interval if streaming else 1,
            )
        )
        request.prompt, request.images, request.pixels = placed.virtual_ids, placed.images, placed.pixels
        result = RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=prompt,
            num_choices=sampling.n,
            streaming=streaming,
            abort=self._abort,
            detokenize=detokenize,
            disagg_request_id=disaggregated_params.disagg_request_id if disaggregated_params else None,
            multimodal_hashes=placed.hashes,
        )
        self._running.add(result)
        if request.pixels and self._core.unsent_bytes > MAX_BACKLOG_BYTES - MAX_PIXEL_BYTES:
            self._refuse_images(request)
        else:
            self._core.send(request)
        if reason := self._ended():
            self._running.fail_all(reason)
        return result

    def generate(self, inputs: Any, sampling_params: Any = None, use_tqdm: bool = True, **kwargs: Any) -> Any:
        """Block until done: one result for one prompt, a list for a list of prompts. `sampling_params` and the other
        arguments of `generate_async` apply to all prompts, or are lists with one entry per prompt.

        Raises ValueError for a list of another length, and what `generate_async` and the requests raise; the
        remaining requests are then aborted.
        """
        from tqdm import tqdm

        several = isinstance(inputs, list) and not all(isinstance(token, int) for token in inputs)
        prompts = inputs if several else [inputs]
        each = list(_one_by_one({"sampling_params": sampling_params} | kwargs, len(prompts)))
        results: list[RequestOutput] = []
        # disable=None: no bar unless stderr is a terminal.
        shown = tqdm(total=len(prompts), desc="Processed requests", disable=None if use_tqdm else True)
        try:
            with shown:
                for prompt, mine in zip(prompts, each, strict=True):
                    results.append(self.generate_async(prompt, **mine))
                for result in results:
                    result.result()
                    shown.update()
        except BaseException:
            for result in results:
                result.abort()
            raise
        return results if several else results[0]

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Events since the last call; empty unless kv_cache_config.event_buffer_max_size is set."""
        return self._events.take()

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        return self._events.wait(timeout)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """One dict per engine step since the last call; empty unless enable_iter_perf_stats is set."""
        return self._stats.take()

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        return self._stats.wait(timeout)

    def get_kv_cache_capacity(self) -> dict[str, int]:
        return {
            "maxNumBlocks": self._core.ready.num_blocks,
            "tokensPerBlock": self._core.ready.tokens_per_block,
        }

    @property
    def disaggregated_params(self) -> dict[str, Any]:
        """Fields by which a GENERATION_FIRST generation_only request names this engine."""
        endpoint = self._core.ready.endpoint
        return {"ctx_dp_rank": None, "ctx_info_endpoint": [endpoint]} if endpoint else {}

    @property
    def is_exact(self) -> bool:
        """A repeated request gets the same answer, here or on another such engine (embedded engine only)."""
        return self._core.ready.is_exact

    def shutdown(self) -> None:
        """End the engine process. Running requests fail."""
        if not self._shut_down:
            self._shut_down = True
            self._core.close()
            self._running.fail_all("LLM is shutting down")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @cached_property
    def llm_id(self) -> str:
        """Unique to this LLM."""
        return f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the model; None with skip_tokenizer_init."""
        if self.args.skip_tokenizer_init:
            return None
        if self.args.tokenizer is not None and not isinstance(self.args.tokenizer, (str, Path)):
            return self.args.tokenizer
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            self.args.tokenizer or self.args.model,
            revision=self.args.tokenizer_revision,
            local_files_only=True,
        )

    @cached_property
    def input_processor(self) -> InputProcessor | None:
        """None for a model that takes no images."""
        tokens = self._core.ready.image_tokens
        return None if tokens is None else InputProcessor(tokens)

    def _check_health(self) -> bool:
        """Dynamo's engine monitor calls this."""
        return self._fatal_error is None and self._core.alive

    @property
    def engine_pid(self) -> int:
        """Process id of the engine core (embedded engine only)."""
        return self.engine_pids[0]

    @property
    def engine_pids(self) -> list[int]:
        """Process ids of all ranks, rank 0 (the engine core) first (embedded engine only)."""
        return self._core.ready.pids

    @property
    def kv_transport(self) -> str:
        """The KV transport's name; "off" without one (embedded engine only)."""
        return self._core.ready.transport

    @property
    def kv_pairing(self) -> str:
        """Equal on both workers of a pair. Version 0.2 lacks it: its handles name other endpoints."""
        is_off = self.kv_transport == "off"
        return "off" if is_off else f"{self.kv_transport}, handles of version {HANDLE_VERSION}"

    # -- internals: the engine itself

    def _read_args(self, model: str | Path, **given: Any) -> LlmArgs:
        """Check all arguments before anything is built. Returns only on the rank that takes requests."""
        args = in_directory(LlmArgs(model=model, **given))
        if ignored := refuse_unsupported(args):
            log.info("these settings have no effect on the embedded engine: %s", ", ".join(ignored))
        # All ranks work on each request.
        args = args.model_copy(update={"enable_attention_dp": False})
        require_divides(Path(args.model), args.tensor_parallel_size)
        check_model(args)
        if serve_as_rank(args.tensor_parallel_size, args.embedded.num_threads, os.environ):
            raise SystemExit(0)
        return args

    def _start_core(self) -> CoreClient:
        own = self.args.embedded
        return CoreClient(
            core_args(self.args),
            num_threads=own.num_threads,
            num_ranks=self.args.tensor_parallel_size,
            step_timeout_seconds=own.step_timeout_seconds,
            on_report=self._on_report,
            on_death=self._on_death,
        )

    def _now(self) -> float:
        """Now, by the clock that the engine measures with."""
        return time.monotonic()

    # -- internals

    def _ended(self) -> str | None:
        """Why the engine ended; None while it runs."""
        if self._fatal_error is not None:
            return str(self._fatal_error)
        return "shutdown was called" if self._shut_down else None

    def _tokenize(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer, but skip_tokenizer_init is set; pass token ids")
        return [int(t) for t in self.tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def _end_ids(self, sampling: SamplingParams) -> list[int]:
        """The model's end ids, plus the tokenizer's if it is loaded (seconds) to decode; as `SamplingParams._setup`."""
        known = list(self._core.ready.end_ids)
        if not sampling.detokenize or self.args.skip_tokenizer_init:
            return known
        end = getattr(self.tokenizer, "eos_token_id", None)
        if isinstance(end, int) and end not in known and end < self._core.ready.vocab_size:
            return [*known, end]
        return known

    def _detokenizer(self, sampling: SamplingParams) -> Any:
        if not sampling.detokenize or self.args.skip_tokenizer_init:
            return None
        return decoder(self.tokenizer, skip_special_tokens=sampling.skip_special_tokens)

    def _abort(self, request_id: int) -> None:
        self._core.send(AbortRequest(request_id))

    def _refuse_images(self, request: AddRequest) -> None:
        """The core is behind: images of more requests would fill its socket's buffer, which ends the engine."""
        reason = "the engine has not received the images of earlier requests yet"
        category = OverloadedError.category
        self._running.deliver([TokenOutput(request.request_id, error=reason, error_category=category)])

    def _on_report(self, report: StepReport) -> None:
        """Runs on the receiver thread."""
        self._num_active = report.num_active
        self._events.extend(report.events)
        self._stats.extend(report.stats)
        self._running.deliver(report.outputs)

    def _on_death(self, reason: str) -> None:
        self._fatal_error = RuntimeError(reason)
        log.error("%s", reason)
        self._running.fail_all(reason)
