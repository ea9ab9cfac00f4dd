"""One running LLM, whichever module it comes from: builds it, and starts its requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec

from trtllm_disagg.engine.capabilities import (
    COUNTS_REQUESTS,
    HAS_CONTEXT_ENDPOINT,
    IS_EXACT,
    TAKES_PRIORITIES,
    TAKES_RANKS,
    Capabilities,
    kv_transport_of,
)
from trtllm_disagg.engine.daemon_thread import in_daemon_thread
from trtllm_disagg.engine.engine_errors import EngineErrors
from trtllm_disagg.engine.engine_facts import EngineFacts
from trtllm_disagg.engine.handoffs_held import HandoffsHeld, lease_seconds_of
from trtllm_disagg.engine.llm_api import LlmApi, RequestOutput, tells_its_end, translate
from trtllm_disagg.engine.rank_placement import Affinity, num_ranks_of, placement_of
from trtllm_disagg.engine.sampling import sampling_params_of
from trtllm_disagg.errors import (
    ConfigError,
    DisaggError,
    EngineError,
    InvalidRequestError,
    WorkerLeavingError,
)
from trtllm_disagg.types import GenerateRequest, InProgress, Rendezvous, one_endpoint
from trtllm_disagg.wire.bodies import decode_disaggregated_params

_CONTEXT_ONLY, _GENERATION_ONLY = "context_only", "generation_only"
#: DisaggScheduleStyle.GENERATION_FIRST; older TensorRT-LLM has no such name.
_GENERATION_FIRST = 1
_LONG_CONTEXT = 128 * 1024
_MOST_STRETCHED = 8
#: After a failed request the engine is asked whether it is alive; without an answer in this time it counts as dead.
_CHECK_SECONDS = 2.0
_NO_AFFINITY = Affinity()
#: As in Dynamo's own worker: health probes share no cached prefix with requests.
_PROBE_SALT = "dynamo-health-check"


class Engine:
    """One running LLM. The three `start_*` methods return its RequestOutput; none of them waits."""

    def __init__(
        self,
        api: LlmApi,
        llm: Any,
        max_seq_len: int | None,
        machine_id: int = 0,
        *,
        measures: bool = False,
        lease_seconds: float = math.inf,
        affinity: Affinity = _NO_AFFINITY,
        abort_seconds: float = 30.0,
    ) -> None:
        """`max_seq_len`: None where unknown. `machine_id` in [0, 1021) makes handoff ids unique among workers.
        `measures`: the engine returns performance metrics with each request. `lease_seconds`: how long it keeps KV that
        is not fetched. `abort_seconds`: no task waits longer for an aborted request, since TensorRT-LLM tells nothing
        more of one that was still in its queue. Raises ConfigError for what the engine cannot do with its arguments.
        """
        self.api, self.llm, self.max_seq_len = api, llm, max_seq_len
        self.capabilities = Capabilities(llm)
        self.request_error = api.request_error
        self.handoffs = HandoffsHeld(lease_seconds)
        self._make_id = api.id_maker(machine_id)
        self._measures = measures
        self._takes_priorities = TAKES_PRIORITIES in self.capabilities
        self._abort_seconds = abort_seconds
        self._args = args = getattr(llm, "args", None)
        self.facts = EngineFacts.of(max_seq_len, args)
        self.num_ranks = num_ranks_of(args)
        #: For traces: how KV is moved, and how much slower than real time the engine's clock runs.
        self.kv_transport = kv_transport_of(llm)
        #: For other workers: the same, and the version of handles where the engine has one.
        self.kv_pairing: str | None = getattr(llm, "kv_pairing", self.kv_transport)
        self.time_scale: float = getattr(llm, "time_scale", 1.0)
        if self.num_ranks > 1 and (TAKES_RANKS not in self.capabilities or api.scheduling_params is None):
            raise ConfigError.bad_value("enable_attention_dp", True, f"false with this version of {api.name}")
        self._place = placement_of(api, self.num_ranks, affinity, args)
        #: Why the engine counts as dead; None while it is alive.
        self.death: str | None = None
        #: The error by which the engine has told a request that it has ended.
        self._reported_end: Exception | None = None
        #: Running task that waits for the engine -> the RequestOutput that it reads.
        self._waiting: dict[asyncio.Future[Any], RequestOutput] = {}
        #: The health check for the requests that have failed, while it runs.
        self._check: asyncio.Future[str | None] | None = None
        #: Requests that the engine has ended, successfully or not.
        self.num_ended = 0
        #: Answers that this engine generates now; prefills for other workers are not counted.
        self.answering = InProgress()

    @classmethod
    def open(
        cls, api: LlmApi, engine_args: dict[str, Any], machine_id: int, affinity: Affinity = _NO_AFFINITY
    ) -> Engine:
        """Build the LLM. Blocks while it loads the model."""
        llm = api.llm(**engine_args)
        return cls(
            api,
            llm,
            # An engine may have room for less than it was asked for.
            min(filter(None, (engine_args.get("max_seq_len"), Capabilities(llm).max_seq_len)), default=None),
            machine_id,
            # Metrics of steps are of no use without those of requests.
            measures=bool(engine_args.get("enable_iter_perf_stats")),
            lease_seconds=lease_seconds_of(engine_args),
            affinity=affinity,
        )

    @property
    def is_exact(self) -> bool:
        """A repeated request gives the same tokens, whatever else runs. TensorRT-LLM does not promise that."""
        return IS_EXACT in self.capabilities

    @property
    def longest_prompt(self) -> int:
        """Longer prompts are refused before they are decoded."""
        # An engine that does not report its length may stretch a model's positions.
        length: int | None = getattr(self.llm, "max_seq_len", None)
        return length or _MOST_STRETCHED * max(self.max_seq_len or 0, _LONG_CONTEXT)

    def start_agg(
        self, request: GenerateRequest, *, streaming: bool = True, max_tokens: int | None = None
    ) -> RequestOutput:
        return self._start(request, None, streaming=streaming, max_tokens=max_tokens)

    def start_prefill(self, request: GenerateRequest) -> RequestOutput:
        rendezvous = request.rendezvous
        params = self.api.disaggregated_params(
            request_type=_CONTEXT_ONLY,
            disagg_request_id=self._make_id() if rendezvous is None else rendezvous.disagg_request_id,
            **({} if rendezvous is None else {"schedule_style": _GENERATION_FIRST}),
            **({} if request.pulled is None else {"opaque_state": request.pulled}),
        )
        return self._start(request, params, streaming=False, max_tokens=1)

    def start_cached(self, request: GenerateRequest) -> RequestOutput:
        """A handoff, under a lease, of the prompt's blocks that are in the cache; none when there are none."""
        params = self.api.disaggregated_params(request_type="cached_only")
        return self._start(request, params, streaming=False, max_tokens=1)

    def rendezvous(self, ctx_info_endpoint: str, ctx_dp_rank: int | None = None) -> Rendezvous:
        """A new id and a prefill engine's endpoint, by which the two phases of one request find each other."""
        return Rendezvous(self._make_id(), ctx_info_endpoint, ctx_dp_rank)

    @property
    def ctx_info_endpoint(self) -> str | None:
        """Where decode engines reach this one; None when it has no such endpoint."""
        if HAS_CONTEXT_ENDPOINT not in self.capabilities:
            return None
        return one_endpoint(self.llm.disaggregated_params["ctx_info_endpoint"])

    @property
    def ctx_dp_rank(self) -> int | None:
        """The attention-DP rank that prefills; None: decode asks all ranks."""
        rank: int | None = (getattr(self.llm, "disaggregated_params", None) or {}).get("ctx_dp_rank")
        return rank

    def start_decode(self, request: GenerateRequest) -> RequestOutput:
        """With the KV of the prefill result or the rendezvous. Raises HandoffRefusedError for an unreadable result."""
        if (met := request.rendezvous) is not None:
            params = self.api.disaggregated_params(
                request_type=_GENERATION_ONLY,
                ctx_request_id=met.disagg_request_id,
                disagg_request_id=met.disagg_request_id,
                ctx_info_endpoint=met.ctx_info_endpoint,
                ctx_dp_rank=met.ctx_dp_rank,
                schedule_style=_GENERATION_FIRST,
            )
            return self._start(request, params, streaming=True)
        if (handoff := request.prefill_result) is None:
            raise InvalidRequestError("a decode worker needs a prefill result, and this request has none")
        params = decode_disaggregated_params(handoff, self.api.disaggregated_params, self.api.logprob)
        return self._start(request, params, streaming=True)

    def require_fit(self, request: GenerateRequest, *, computes_prompt: bool = True) -> None:
        """Raises InvalidRequestError, where TensorRT-LLM's error for a prompt that is too long would not blame it."""
        if (why := self.facts.why_unfit(request, computes_prompt=computes_prompt)) is not None:
            raise InvalidRequestError(why)

    # -- health

    @property
    def fatal_error(self) -> BaseException | None:
        """The error that TensorRT-LLM has recorded as the cause of its death, or has told a request. Never blocks."""
        for place in (self.llm, getattr(self.llm, "_executor", None)):
            error: BaseException | None = getattr(place, "_fatal_error", None)
            if isinstance(error, BaseException):
                return error
        return self._reported_end

    def _note_end(self, error: Exception) -> None:
        if tells_its_end(error):
            self._reported_end = error

    def why_unhealthy(self) -> str | None:
        """What is wrong with the engine; None when it is healthy, or has no health check. May block."""
        if (error := self.fatal_error) is not None:
            return f"{type(error).__name__}: {error}"
        check = getattr(self.llm, "_check_health", None)
        if not callable(check):
            check = getattr(getattr(self.llm, "_executor", None), "check_health", None)
        if not callable(check):
            return None
        try:
            return None if check() else "it says that it is not healthy"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    async def is_alive(self) -> bool:
        """False when the engine is unhealthy, or does not answer in time."""
        if self.death is not None or self.fatal_error is not None:
            return False
        if self._check is None or self._check.done():
            # One thread, however many requests fail at once on an engine that blocks it.
            self._check = in_daemon_thread(self.why_unhealthy, "engine-check")
        try:
            return await asyncio.wait_for(asyncio.shield(self._check), _CHECK_SECONDS) is None
        except TimeoutError:
            return False

    def die(self, reason: str) -> None:
        """Declare the engine dead: every request that waits for it ends with WorkerLeavingError."""
        self.death = self.death or reason
        for waiting in list(self._waiting):
            waiting.cancel()

    def cancel_at_death(self, waiting: asyncio.Future[Any], result: RequestOutput) -> None:
        """Cancel `waiting`, which reads `result`, when the engine dies: TensorRT-LLM's results may block for ever."""
        self._waiting[waiting] = result
        waiting.add_done_callback(self._end)
        if self.death is not None:
            waiting.cancel()

    def abort(self, result: RequestOutput) -> None:
        """Nothing is aborted on a dead engine: TensorRT-LLM sends an abort to its process, which may block for ever."""
        if self.death is None and self.fatal_error is None:
            result.abort()
            if not result.finished:
                asyncio.get_running_loop().call_later(self._abort_seconds, self._wait_no_longer, result)

    def _wait_no_longer(self, result: RequestOutput) -> None:
        for waiting in [waiting for waiting, read in self._waiting.items() if read is result]:
            waiting.cancel()

    def _end(self, waiting: asyncio.Future[Any]) -> None:
        del self._waiting[waiting]
        if not waiting.cancelled():
            self.num_ended += 1

    def has_requests(self) -> bool:
        """Whether any task waits for a request. Thread-safe."""
        return bool(self._waiting)

    def tokens_so_far(self) -> dict[asyncio.Future[Any], int]:
        """Waiting task -> number of tokens that its request has so far."""
        return {
            waiting: sum(len(output.token_ids) for output in result.outputs)
            for waiting, result in self._waiting.items()
        }

    async def finished(self, result: RequestOutput, on_failure: Callable[[], None] = lambda: None) -> None:
        """Wait for the end of a request. Raises a DisaggError; `on_failure`: see EngineErrors."""
        async with EngineErrors(self, on_failure):
            waiting = asyncio.ensure_future(result.aresult())
            self.cancel_at_death(waiting, result)
            await waiting

    async def failure(self, error: Exception) -> DisaggError:
        """The error for a request that failed with `error` in the engine."""
        self._note_end(error)
        if not await self.is_alive():
            return WorkerLeavingError(str(error))
        return translate(error, isinstance(error, self.request_error))

    async def probe(self, request: GenerateRequest) -> None:
        """Is an engine that is alive able to work? Runs a request, with one token unless it sets more."""
        salted = msgspec.structs.replace(request, cache_salt=request.cache_salt or _PROBE_SALT)
        max_tokens = None if request.stop.max_tokens else 1
        result = self.start_agg(salted, streaming=False, max_tokens=max_tokens)
        try:
            await self.finished(result)
        except asyncio.CancelledError:
            self.abort(result)
            raise

    async def is_idle(self) -> bool:
        """No request runs in the engine, and no KV waits to be fetched. Handlers count their own requests."""
        if COUNTS_REQUESTS in self.capabilities:
            return int(self.llm.num_active_requests) == 0
        return self.handoffs.count() == 0

    def close(self) -> None:
        """May block for ever, as TensorRT-LLM waits for its ranks; `engine.health.close` limits that."""
        self.llm.shutdown()

    # -- internals

    def _start(
        self, request: GenerateRequest, params: Any, *, streaming: bool, max_tokens: int | None = None
    ) -> RequestOutput:
        """Raises InvalidRequestError for a request that the engine refuses, WorkerLeavingError where it is over."""
        if self.death is not None:
            raise WorkerLeavingError(f"the engine is dead: {self.death}")
        is_decode = getattr(params, "request_type", None) == _GENERATION_ONLY
        self.require_fit(request, computes_prompt=not is_decode)
        measures = self._measures or request.span.is_recording
        sampling_params = sampling_params_of(
            self.api, request, max_tokens, self.max_seq_len, measures=measures, engine_args=self._args
        )
        optional = {
            "disaggregated_params": params,
            "cache_salt": request.cache_salt,
            "priority": request.priority if self._takes_priorities else None,
            "trace_headers": request.span.headers(request.trace_headers),
        }
        keywords = {name: value for name, value in optional.items() if value is not None} | self._place(
            request
        )
        try:
            result: RequestOutput = self.llm.generate_async(
                inputs=request.token_ids, sampling_params=sampling_params, streaming=streaming, **keywords
            )
            return result
        except (self.request_error, ValueError, TypeError, NotImplementedError) as error:
            self._note_end(error)
            # The engine has not accepted the request yet, so unless the engine is over, the request is wrong.
            raise (WorkerLeavingError if self._is_over else InvalidRequestError)(str(error)) from error
        except Exception as error:
            self._note_end(error)
            is_over = self._is_over or "shutting down" in str(error)
            raise (WorkerLeavingError if is_over else EngineError)(str(error)) from error

    @property
    def _is_over(self) -> bool:
        """TensorRT-LLM has shut down. It does so when its process dies, and raises the cause from the next call."""
        is_shutdown = getattr(getattr(self.llm, "_executor", None), "is_shutdown", None)
        return self.fatal_error is not None or (callable(is_shutdown) and bool(is_shutdown()))
