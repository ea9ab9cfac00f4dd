"""A scripted LLM: TensorRT-LLM's LLM API, with the embedded engine's signatures and types, and no model.

It stands in for `tensorrt_llm` in tests (with TensorRT-LLM's hard edges), and is the engine `--engine recording`, which
reads no weights: use that to measure the cost of frontend and workers. It records every call, and refuses names and
keywords that TensorRT-LLM lacks. A token depends on the text before it, so two workers that split a request give the
same tokens as one.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from trtllm_disagg.engines.embedded import (
    DEFAULT_REQUEST_PRIORITY,
    CompletionOutput,
    DisaggregatedParams,
    DisaggScheduleStyle,
    GuidedDecodingParams,
    LlmArgs,
    Logprob,
    SamplingParams,
    SchedulingParams,
    get_global_disagg_request_id,
)
from trtllm_disagg.engines.embedded import LLM as EmbeddedLLM
from trtllm_disagg.engines.embedded.kv_cache.block_manager import BlockManager, KvEventLog
from trtllm_disagg.engines.embedded.kv_transfer.transports import embedded_only_backends
from trtllm_disagg.engines.embedded.params.llm_args import as_plain
from trtllm_disagg.engines.recording.hard_edges import FORGIVING, EngineDeadError, HardEdges, RequestError
from trtllm_disagg.engines.recording.image_prompts import (
    HOST_MEMORY,
    Image,
    Images,
    InputProcessor,
    SharedTensorContainer,
    images_of,
)
from trtllm_disagg.engines.recording.result import AS_IT_IS, EOS_TOKEN, Pace, RequestOutput, Script, Serving
from trtllm_disagg.engines.recording.state import KvHolder, KvStore, News, block, drained

#: TensorRT-LLM's other names are the embedded engine's.
__all__ = [
    "DEFAULT_REQUEST_PRIORITY",
    "LLM",
    "CompletionOutput",
    "DisaggScheduleStyle",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulingParams",
    "Script",
    "SharedTensorContainer",
    "get_global_disagg_request_id",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

#: The argument that selects the recording engine; its value is a `Pace`.
_RECORDING = "recording"
_NOT_TENSORRT_LLMS = "embedded"
_NUM_BLOCKS, _MAX_WINDOW = 1024, 1 << 20
#: Maximum recorded calls and results, since a worker may run for days.
_KEPT = 256


#: Text, token ids and images of a prompt.
PreprocessedInputs = tuple[str | None, list[int], Images]


@dataclass(frozen=True, slots=True)
class Call:
    """One call with its given arguments, without defaults."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def _takes(
    method: Callable[Concatenate[EmbeddedLLM, P], Any],
) -> Callable[[Callable[[LLM, dict[str, Any]], R]], Callable[Concatenate[LLM, P], R]]:
    """Gives a method the embedded engine's signature; records the arguments and passes them by name."""
    signature = inspect.signature(method)
    _, *parameters = signature.parameters.values()
    names = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
    required = {each.name for each in parameters if each.name in names and each.default is each.empty}

    def decorate(answer: Callable[[LLM, dict[str, Any]], R]) -> Callable[Concatenate[LLM, P], R]:
        @functools.wraps(method)
        def taking(self: LLM, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if not args and required <= kwargs.keys() <= names:
                given = dict[str, Any](kwargs)
            else:  # names positional arguments, or raises; too slow for every request (a third of a call)
                given = dict(signature.bind(self, *args, **kwargs).arguments)
                del given["self"]
            _keep(self.calls, Call(method.__name__, given))
            return answer(self, given)

        return taking

    return decorate


class LLM(Serving):
    """Give it scripts, then check `calls`. `LLM.instances` lists those that the tested code built."""

    instances: ClassVar[list[LLM]] = []
    #: KV that waits for decode: a test has both workers of a pair in one process.
    kv_store: ClassVar[KvStore] = KvStore()
    #: The edges of engines built from now on.
    next_edges: ClassVar[HardEdges] = FORGIVING

    calls: list[Call]

    def __new__(cls, *args: Any, **kwargs: Any) -> LLM:
        made = super().__new__(cls)
        made.calls = []
        return made

    @_takes(EmbeddedLLM.__init__)  # type: ignore[arg-type]  # mypy minds how an __init__ names its self
    def __init__(self, given: dict[str, Any]) -> None:
        given |= given.pop("kwargs", {})
        self.calls[0] = Call("LLM", _without_defaults(given))
        is_engine = _RECORDING in given
        pace = Pace.model_validate(given.pop(_RECORDING, None) or {})
        if _NOT_TENSORRT_LLMS in given:
            raise ValueError(f"LLM() got an unknown argument {_NOT_TENSORRT_LLMS!r}")
        self.args = LlmArgs.model_validate({name: as_plain(value) for name, value in given.items()})
        if self._transceiver("backend") in embedded_only_backends():
            raise ValueError(
                f"cache_transceiver_config.backend {self._transceiver('backend')!r} is not one of TensorRT-LLM's"
            )
        self.is_engine = is_engine
        self.edges = LLM.next_edges
        self.kv = KvHolder() if is_engine else LLM.kv_store
        self.pace = pace
        milliseconds = self._transceiver("kv_transfer_timeout_ms")
        self.kv_seconds = None if milliseconds is None else milliseconds / 1000
        self.is_python_transceiver = self._transceiver("transceiver_runtime") == "PYTHON"
        self.dp_rank = 0 if self.args.enable_attention_dp else None
        self.scripts: deque[Script] = deque()
        self.results: list[RequestOutput] = []
        #: KV events since the last reader.
        self.kv_cache_events: list[dict[str, Any]] = []
        kv_config = self.args.kv_cache_config
        log = KvEventLog(kv_config.event_buffer_max_size, _MAX_WINDOW)
        reuses, size = kv_config.enable_block_reuse, kv_config.tokens_per_block
        self._blocks = BlockManager(_NUM_BLOCKS, size, enable_reuse=reuses, events=log)
        self.input_processor = InputProcessor.of_model(self.args.model, pace.image_tokens)
        #: Contents of decodes' blocks, by keys without images.
        self._fetched: dict[bytes, list[int]] = {}
        self.stats: list[dict[str, Any]] = []
        is_bound = self.edges.binds_iterators_to_first_loop
        self._event_news = News("KV cache events", is_bound=is_bound)
        self._stat_news = News("iteration statistics", is_bound=is_bound)
        self.is_shut_down = False
        #: `_check_health` of a living engine.
        self.is_healthy = True
        self._executor = _Executor()
        #: While unset, `shutdown` waits for it, as for an MPI worker that never ends.
        self.may_shut_down = threading.Event()
        self.may_shut_down.set()
        self.may_abort = threading.Event()
        if not is_engine:
            LLM.instances.append(self)

    # -- for tests

    @classmethod
    def forget_instances(cls) -> None:
        """Reset for a new test."""
        cls.instances.clear()
        cls.kv_store.clear()
        HOST_MEMORY.clear()

    def calls_of(self, name: str) -> list[dict[str, Any]]:
        """The arguments of every call of one method, in order."""
        return [call.arguments for call in self.calls if call.name == name]

    def die(self, error: BaseException | None = None) -> None:
        """End the engine's process: running requests get no further answer, new ones are refused."""
        self.fatal_error = error or EngineDeadError("the engine process has ended")

    @property
    def held_contexts(self) -> int:
        """Number of this engine's prefills with KV neither fetched nor timed out."""
        return self.kv.held_by(self)

    def forget(self, ended: RequestOutput) -> None:
        """Drop a request after its last response."""
        self._executor._results.pop(ended.request_id, None)

    def step_ended(self, ended: RequestOutput) -> None:
        """Record a step in which a request ended; other steps are not reported."""
        if self.edges.counts_kv_in_steps and self.args.enable_iter_perf_stats:
            held = {"usedNumBlocks": self.held_contexts, "maxNumBlocks": _NUM_BLOCKS}
            active = {"numActiveRequests": self.num_running, "numQueuedRequests": 0}
            _keep(self.stats, {**active, "kvCacheStats": held})

    def num_cached(self, prompt: list[int], salt: str) -> int:
        """Tokens that earlier requests left in blocks; none for `--engine recording`, to save time."""
        keys = [] if self.is_engine else self._blocks.prompt_keys(prompt[:-1], salt.encode())
        return len(self._blocks.match(keys)) * self._blocks.tokens_per_block

    def keep(self, tokens: list[int], salt: str, images: Images) -> None:
        """Leave a request's tokens in blocks."""
        count = len(tokens) // self._blocks.tokens_per_block
        if count and not self.is_engine:
            blocks = self._blocks.allocate(min(count, _NUM_BLOCKS))
            self._blocks.commit(tokens, blocks, [], salt.encode(), salt)
            self._blocks.release(blocks)
            for event in self._blocks.events.take():
                self.kv_cache_events.append(self.input_processor.name_images(event, images))

    def fetch(self, prompt: list[int], contents: list[int], salt: str) -> list[int]:
        """The contents of a decode's blocks: of those that it reuses, and of those that it fetches."""
        contents = contents[:]
        if self.args.kv_cache_config.enable_block_reuse and self.edges.reuses_other_images_in_decode:
            size = self._blocks.tokens_per_block
            keys = self._blocks.prompt_keys(prompt[:-1], salt.encode())
            for key, start in zip(keys, itertools.count(0, size), strict=False):
                block = slice(start, start + size)
                contents[block] = self._fetched.setdefault(key, contents[block])
        return contents

    def lose_responses(self, aborted: RequestOutput) -> None:
        """Lose this step's responses, including the end of `aborted`."""
        self.response_error = RequestError(
            "context_logits must not be None when prompt_logprobs is requested."
        )
        for result in self.results:
            result.loses_step = not result.finished

    @property
    def reports_cached_prompts(self) -> bool:
        """As the embedded engine says it; TensorRT-LLM has no such name."""
        return not self.edges.counts_logprobs_behind_cached

    @property
    def releases_handoffs(self) -> bool:
        """As the embedded engine says it; TensorRT-LLM has no such name."""
        return not self.edges.keeps_kv_of_ended_requests

    @property
    def num_active_requests(self) -> int:
        """As on the embedded engine, for `--engine recording`; TensorRT-LLM has no such name."""
        if not self.is_engine:
            raise AttributeError("num_active_requests")
        return self.num_running

    # -- TensorRT-LLM's

    @_takes(EmbeddedLLM.preprocess)
    def preprocess(self, given: dict[str, Any]) -> PreprocessedInputs:
        """Writes the positions of images into the parameters, which must be those of `generate_async`."""
        return self._preprocess(given)

    @_takes(EmbeddedLLM.generate_async)
    def generate_async(self, given: dict[str, Any]) -> RequestOutput:
        if (
            self.edges.raises_what_it_died_of
            and self.fatal_error is not None
            and not self._executor.is_shutdown()
        ):
            self._executor.doing_shutdown = True
            raise self.fatal_error
        if self.is_shut_down or self.fatal_error is not None:
            raise RuntimeError("LLM is shutting down")
        sampling = given.get("sampling_params") or SamplingParams()
        params = given.get("disaggregated_params")
        prompt, token_ids, images = self._preprocess(given)
        if not images and _is_decode(params) and not self.edges.reuses_other_images_in_decode:
            images = [Image(digest) for digest in getattr(params, "multimodal_hashes", None) or ()]
        self._check_request(token_ids, sampling, params, given.get("priority", DEFAULT_REQUEST_PRIORITY))
        if self.edges.changes_sampling_params and not self.is_engine:
            if "sampling_params" in given:
                given["sampling_params"] = replace(sampling)  # `calls` keeps the caller's object
            self._set_up(sampling, params)
        result = RequestOutput(
            prompt=prompt,
            prompt_token_ids=token_ids,
            images=images,
            sampling=sampling,
            disaggregated_params=params,
            streaming=given.get("streaming", False),
            cache_salt=given.get("cache_salt") or "",
            script=self.scripts.popleft() if self.scripts else AS_IT_IS,
            engine=self,
        )
        self.num_running += 1
        self._executor._results[result.request_id] = result
        _keep(self.results, result)
        return result

    @_takes(EmbeddedLLM.get_kv_cache_events_async)
    def get_kv_cache_events_async(self, given: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        return self._news(self._event_news, self._events_made(), given)

    @_takes(EmbeddedLLM.get_kv_cache_events)
    def get_kv_cache_events(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        return self._drained(self._events_made(), given)

    @_takes(EmbeddedLLM.get_stats_async)
    def get_stats_async(self, given: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        return self._news(self._stat_news, self._stats_made(), given)

    @_takes(EmbeddedLLM.get_stats)
    def get_stats(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        return self._drained(self._stats_made(), given)

    @_takes(EmbeddedLLM.get_kv_cache_capacity)
    def get_kv_cache_capacity(self, given: dict[str, Any]) -> dict[str, int]:
        return {"maxNumBlocks": _NUM_BLOCKS, "tokensPerBlock": self.args.kv_cache_config.tokens_per_block}

    @_takes(EmbeddedLLM.shutdown)
    def shutdown(self, given: dict[str, Any]) -> None:
        self.may_shut_down.wait()
        self.is_shut_down = True

    def _check_health(self) -> bool:
        """Private in TensorRT-LLM too; Dynamo's engine monitor calls it."""
        if self.fatal_error is not None and self.edges.raises_when_unhealthy:
            raise self.fatal_error
        return self.is_healthy and not self.is_shut_down and self.fatal_error is None

    @property
    def disaggregated_params(self) -> dict[str, Any]:
        """What a decode engine needs for GENERATION_FIRST: an endpoint per rank of pipeline parallelism. Python
        transceiver only (_torch/pyexecutor/kv_cache_transceiver.py).
        """
        if not self.is_python_transceiver or self.is_engine:
            return {}
        rank = None if self.args.enable_attention_dp else 0
        return {"ctx_dp_rank": rank, "ctx_info_endpoint": ["tcp://prefill/"]}

    # -- internals

    def _transceiver(self, name: str) -> Any:
        return getattr(self.args.cache_transceiver_config, name, None)

    def _events_made(self) -> list[dict[str, Any]]:
        is_on = bool(self.args.kv_cache_config.event_buffer_max_size)
        return self._made(self.kv_cache_events, is_on, "KV cache events need event_buffer_max_size")

    def _stats_made(self) -> list[dict[str, Any]]:
        is_on = self.args.enable_iter_perf_stats
        return self._made(self.stats, is_on, "iteration statistics need enable_iter_perf_stats")

    def _made(self, made: list[dict[str, Any]], is_on: bool, need: str) -> list[dict[str, Any]]:
        if not is_on and not self.edges.is_silent_when_off and not self.is_engine:
            raise RuntimeError(need)
        return made if is_on else []

    def _news(
        self, news: News, made: list[dict[str, Any]], given: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        timeout = given.get("timeout", 2)
        return news.block_and_take(made, timeout) if self.edges.blocks_for_news else news.take(made, timeout)

    def _drained(self, made: list[dict[str, Any]], given: dict[str, Any]) -> list[dict[str, Any]]:
        if self.edges.blocks_for_news:
            block(made, given.get("timeout", 2))
        return drained(made)

    def _preprocess(self, given: dict[str, Any]) -> PreprocessedInputs:
        inputs, params = given["inputs"], given.get("disaggregated_params")
        if isinstance(inputs, tuple):
            return inputs
        prompt, token_ids = _read_inputs(inputs)
        if images := images_of(inputs):
            token_ids = self._expand(token_ids, images, params)
            if self.is_engine:
                given["inputs"] = token_ids  # `calls` keeps no images
        return prompt, token_ids, images

    def _expand(self, prompt: list[int], images: Images, params: DisaggregatedParams | None) -> list[int]:
        """The prompt with image tokens. Raises ValueError for images that have no place in the request."""
        if _is_decode(params):
            raise ValueError("generation_only takes no images")
        if self.edges.retokenises_prompts_with_images:
            if self.args.skip_tokenizer_init:
                raise ValueError("images need the tokenizer, but skip_tokenizer_init is set")
            prompt = self.input_processor.retokenised(prompt)
        expanded = self.input_processor.expanded(prompt, len(images))
        if params is not None and self.input_processor.has_mrope:
            self.input_processor.add_positions(params, expanded)
        return expanded

    def _check_request(
        self,
        token_ids: list[int],
        sampling: SamplingParams,
        params: DisaggregatedParams | None,
        priority: float,
    ) -> None:
        """Refuse what TensorRT-LLM refuses, at once or later."""
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(sampling).__name__}")
        if not 0 <= priority <= 1:
            raise ValueError(f"priority must be in [0, 1], got {priority}")
        if sampling.n > self.args.max_batch_size and self.edges.is_blocked_by_too_many_choices:
            self.is_full = True
        elif sampling.n > self.args.max_batch_size:
            raise ValueError(f"n ({sampling.n}) exceeds max_batch_size ({self.args.max_batch_size})")
        is_bare = self.edges.needs_end_id_without_tokenizer and self.args.skip_tokenizer_init
        if is_bare and sampling.end_id is None:
            raise ValueError("without a tokenizer sampling_params need an end_id")
        self._check_length(len(token_ids), params)
        if params is not None:
            self._check_disaggregated_params(params, sampling)

    @staticmethod
    def _set_up(sampling: SamplingParams, params: DisaggregatedParams | None) -> None:
        if sampling.end_id is None:
            sampling.end_id = EOS_TOKEN
        if sampling.pad_id is None:
            sampling.pad_id = sampling.end_id
        if params is not None and params.request_type == "context_only":
            sampling.max_tokens = 1

    def _check_length(self, length: int, params: DisaggregatedParams | None) -> None:
        longest, largest = self.args.max_seq_len, self.args.max_num_tokens
        if self.edges.has_request_errors_for_length:
            if length > largest and not self.args.enable_chunked_prefill and not _is_decode(params):
                raise RequestError(
                    f"The sum of prompt length ({length:.1f}), query length (0) should not exceed "
                    f"max_num_tokens ({largest})"
                )
        elif longest is not None and length >= longest:
            raise ValueError(f"prompt length {length} exceeds max_seq_len ({longest})")

    def _check_disaggregated_params(self, params: object, sampling: SamplingParams) -> None:
        if not isinstance(params, DisaggregatedParams):
            raise TypeError(f"disaggregated_params must be DisaggregatedParams, got {type(params).__name__}")
        split = params.request_type in ("context_only", "generation_only")
        if split and self._transceiver("backend") is None:
            raise ValueError(f"{params.request_type} needs cache_transceiver_config.backend")
        if split and sampling.n != 1:
            raise ValueError(f"{params.request_type} takes one choice, got n={sampling.n}")
        endpoint = params.ctx_info_endpoint
        if self.edges.takes_one_endpoint and not isinstance(endpoint, str | None):
            error = TypeError(f"ContextPhaseParams: ctx_info_endpoint is a str or None, got {endpoint!r}")
            self.die(error)
            self._executor.doing_shutdown = True
            raise error


@dataclass(slots=True)
class _Executor:
    """The used part of TensorRT-LLM's process proxy."""

    doing_shutdown: bool = False
    #: Requests without a last response.
    _results: dict[int, RequestOutput] = field(default_factory=dict)

    def is_shutdown(self) -> bool:
        return self.doing_shutdown


def _keep(newest: list[T], item: T) -> None:
    newest.append(item)
    del newest[:-_KEPT]


def _without_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(LLM.__init__).parameters
    return {
        name: value
        for name, value in given.items()
        if name not in parameters or value != parameters[name].default
    }


def _is_decode(params: object) -> bool:
    return getattr(params, "request_type", None) == "generation_only"


def _read_inputs(inputs: object) -> tuple[str | None, list[int]]:
    if isinstance(inputs, Mapping):
        if "prompt_token_ids" in inputs:
            return inputs.get("prompt"), list(inputs["prompt_token_ids"])
        inputs = inputs.get("prompt")
    if isinstance(inputs, str):
        # There is no tokenizer: one token per character.
        return inputs, [ord(character) for character in inputs]
    if isinstance(inputs, list):
        # The checksum over all (`_Answer`) raises for anything but numbers.
        return None, list(inputs)
    raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
