"""A scripted LLM: TensorRT-LLM's LLM API, with signatures and types of the embedded engine's, and no model.

It stands in for `tensorrt_llm` in tests (`mounted.py`, with TensorRT-LLM's hard edges) and is the engine
`--engine recording`, which makes no real tokens and reads no weights: what is measured around it is the frontend's
and the workers' own cost. It records every call and refuses every name and keyword that TensorRT-LLM has not. A token
is a function of the text before it, so two workers that split a request give the same tokens as one that runs it whole.
"""

from __future__ import annotations

import functools
import inspect
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
from trtllm_disagg.engines.embedded.kv_transfer.transports import embedded_only_backends
from trtllm_disagg.engines.embedded.params.llm_args import as_plain
from trtllm_disagg.engines.recording.hard_edges import FORGIVING, EngineDeadError, HardEdges, RequestError
from trtllm_disagg.engines.recording.result import (
    AS_IT_IS,
    EOS_TOKEN,
    Pace,
    RequestOutput,
    Script,
)
from trtllm_disagg.engines.recording.state import KvHolder, KvStore, News, block, taken

#: The rest of TensorRT-LLM's names is the embedded engine's own.
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
    "get_global_disagg_request_id",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

#: An engine's argument that turns the recording engine on; its value is a `Pace`.
_RECORDING = "recording"
_NOT_TENSORRT_LLMS = "embedded"
_NUM_BLOCKS = 1024
#: Calls and results; a worker may run for days.
_KEPT = 256


@dataclass(frozen=True, slots=True)
class Call:
    """One call, with the arguments that were given; defaults are not listed."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def _takes(
    method: Callable[Concatenate[EmbeddedLLM, P], Any],
) -> Callable[[Callable[[LLM, dict[str, Any]], R]], Callable[Concatenate[LLM, P], R]]:
    """What the embedded engine's method takes; what was given is recorded, and handed over by name."""
    signature = inspect.signature(method)
    _, *parameters = signature.parameters.values()
    names = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
    required = {each.name for each in parameters if each.name in names and each.default is each.empty}

    def decorate(answer: Callable[[LLM, dict[str, Any]], R]) -> Callable[Concatenate[LLM, P], R]:
        @functools.wraps(method)
        def taking(self: LLM, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if not args and required <= kwargs.keys() <= names:
                given = dict[str, Any](kwargs)
            else:  # names those without a name, or raises; for every request it would be a third of a call
                given = dict(signature.bind(self, *args, **kwargs).arguments)
                del given["self"]
            _keep(self.calls, Call(method.__name__, given))
            return answer(self, given)

        return taking

    return decorate


class LLM:
    """Give it scripts, then look at `calls`. `LLM.instances` lists those that the tested code has built."""

    instances: ClassVar[list[LLM]] = []
    #: One process holds both workers of a pair in a test, so KV that is waiting for a decode lives here.
    kv_store: ClassVar[KvStore] = KvStore()
    #: The edges of engines that are built from now on.
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
        #: True: only the length options of a request have an effect.
        self.is_engine = is_engine
        self.edges = LLM.next_edges
        self.kv = KvHolder() if is_engine else LLM.kv_store
        self.pace = pace
        #: How long KV waits for a decode; None: for ever.
        milliseconds = self._transceiver("kv_transfer_timeout_ms")
        self.kv_seconds = None if milliseconds is None else milliseconds / 1000
        self.is_python_transceiver = self._transceiver("transceiver_runtime") == "PYTHON"
        #: The rank that all requests run on under attention DP, else None.
        self.dp_rank = 0 if self.args.enable_attention_dp else None
        self.num_running = 0
        self.scripts: deque[Script] = deque()
        self.results: list[RequestOutput] = []
        #: KV events since the last reader.
        self.kv_cache_events: list[dict[str, Any]] = []
        self.stats: list[dict[str, Any]] = []
        is_bound = self.edges.binds_iterators_to_first_loop
        self._event_news = News("KV cache events", is_bound=is_bound)
        self._stat_news = News("iteration statistics", is_bound=is_bound)
        self.is_shut_down = False
        #: What `_check_health` returns for an engine that is alive.
        self.is_healthy = True
        self.fatal_error: BaseException | None = None
        self._executor = _Executor()
        #: Requests get no answer any more, and nothing says so.
        self.stands_still = False
        #: Requests that come now wait in the engine's queue, until they are aborted.
        self.is_full = False
        #: Set it to something unset, and `shutdown` waits for it: an MPI worker that never ends.
        self.may_shut_down = threading.Event()
        self.may_shut_down.set()
        #: Set it, and aborts that a dead engine blocks return.
        self.may_abort = threading.Event()
        if not is_engine:
            LLM.instances.append(self)

    # -- for tests

    @classmethod
    def forget_instances(cls) -> None:
        """Start a new test."""
        cls.instances.clear()
        cls.kv_store.clear()

    def calls_of(self, name: str) -> list[dict[str, Any]]:
        """The arguments of every call of one method, in order."""
        return [call.arguments for call in self.calls if call.name == name]

    def die(self, error: BaseException | None = None) -> None:
        """The engine's process ends: requests that run get no answer any more, new ones are refused."""
        self.fatal_error = error or EngineDeadError("the engine process has ended")

    @property
    def held_contexts(self) -> int:
        """Prefills of this engine with KV that no decode has fetched, and no timeout freed."""
        return self.kv.held_by(self)

    def step_ended(self, ended: RequestOutput) -> None:
        """A step in which a request has ended: the stand-in tells of no other one."""
        if self.edges.counts_kv_in_steps and self.args.enable_iter_perf_stats:
            held = {"usedNumBlocks": self.held_contexts, "maxNumBlocks": _NUM_BLOCKS}
            active = {"numActiveRequests": self.num_running, "numQueuedRequests": 0}
            _keep(self.stats, {**active, "kvCacheStats": held})

    @property
    def releases_handoffs(self) -> bool:
        """As the embedded engine says it; TensorRT-LLM has no such name."""
        return not self.edges.keeps_kv_of_ended_requests

    @property
    def num_active_requests(self) -> int:
        """The engine `recording` tells, as the embedded one does; TensorRT-LLM has no such name."""
        if not self.is_engine:
            raise AttributeError("num_active_requests")
        return self.num_running

    # -- TensorRT-LLM's

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
        prompt, token_ids = _read_inputs(given["inputs"])
        sampling = given.get("sampling_params") or SamplingParams()
        params = given.get("disaggregated_params")
        self._check_request(token_ids, sampling, params, given.get("priority", DEFAULT_REQUEST_PRIORITY))
        if self.edges.changes_sampling_params and not self.is_engine:
            if "sampling_params" in given:
                given["sampling_params"] = replace(sampling)  # `calls` has it as it was given
            self._set_up(sampling, params)
        result = RequestOutput(
            prompt=prompt,
            prompt_token_ids=token_ids,
            sampling=sampling,
            disaggregated_params=params,
            streaming=given.get("streaming", False),
            script=self.scripts.popleft() if self.scripts else AS_IT_IS,
            engine=self,
        )
        self.num_running += 1
        _keep(self.results, result)
        return result

    @_takes(EmbeddedLLM.get_kv_cache_events_async)
    def get_kv_cache_events_async(self, given: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        return self._news(self._event_news, self._events_made(), given)

    @_takes(EmbeddedLLM.get_kv_cache_events)
    def get_kv_cache_events(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        return self._taken(self._events_made(), given)

    @_takes(EmbeddedLLM.get_stats_async)
    def get_stats_async(self, given: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        return self._news(self._stat_news, self._stats_made(), given)

    @_takes(EmbeddedLLM.get_stats)
    def get_stats(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        return self._taken(self._stats_made(), given)

    @_takes(EmbeddedLLM.get_kv_cache_capacity)
    def get_kv_cache_capacity(self, given: dict[str, Any]) -> dict[str, int]:
        return {"maxNumBlocks": _NUM_BLOCKS, "tokensPerBlock": self.args.kv_cache_config.tokens_per_block}

    @_takes(EmbeddedLLM.shutdown)
    def shutdown(self, given: dict[str, Any]) -> None:
        self.may_shut_down.wait()
        self.is_shut_down = True

    def _check_health(self) -> bool:
        """Not public in TensorRT-LLM either; Dynamo's engine monitor asks it."""
        if self.fatal_error is not None and self.edges.raises_when_unhealthy:
            raise self.fatal_error
        return self.is_healthy and not self.is_shut_down and self.fatal_error is None

    @property
    def disaggregated_params(self) -> dict[str, Any]:
        """What a decode engine has to know for GENERATION_FIRST. Only the Python transceiver serves it
        (_torch/pyexecutor/kv_cache_transceiver.py); one endpoint for each rank of pipeline parallelism.
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

    def _taken(self, made: list[dict[str, Any]], given: dict[str, Any]) -> list[dict[str, Any]]:
        if self.edges.blocks_for_news:
            block(made, given.get("timeout", 2))
        return taken(made)

    def _check_request(
        self,
        token_ids: list[int],
        sampling: SamplingParams,
        params: DisaggregatedParams | None,
        priority: float,
    ) -> None:
        """What TensorRT-LLM refuses at once, and here also what it would only trip over later."""
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
        is_decode = params is not None and getattr(params, "request_type", None) == "generation_only"
        longest, largest = self.args.max_seq_len, self.args.max_num_tokens
        if self.edges.has_request_errors_for_length:
            if length > largest and not self.args.enable_chunked_prefill and not is_decode:
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
    """TensorRT-LLM's proxy of its processes, as far as it is looked at."""

    doing_shutdown: bool = False

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


def _read_inputs(inputs: object) -> tuple[str | None, list[int]]:
    if isinstance(inputs, Mapping):
        if "prompt_token_ids" in inputs:
            return inputs.get("prompt"), list(inputs["prompt_token_ids"])
        inputs = inputs.get("prompt")
    if isinstance(inputs, str):
        # No tokenizer: characters are as good as tokens.
        return inputs, [ord(character) for character in inputs]
    if isinstance(inputs, list):
        # What is no number is found by the checksum over all (`_Answer`).
        return None, list(inputs)
    raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
