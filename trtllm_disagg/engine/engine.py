"""Builds an LLM of any engine, and starts its requests."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import msgspec

from trtllm_disagg.engine.capabilities import (
    COUNTS_REQUESTS,
    HAS_CONTEXT_ENDPOINT,
    IS_EXACT,
    REPORTS_CACHED_PROMPTS,
    TAKES_PRIORITIES,
    TAKES_RANKS,
    Capabilities,
    kv_transport_of,
)
from trtllm_disagg.engine.daemon_thread import in_daemon_thread
from trtllm_disagg.engine.engine_errors import EngineErrors
from trtllm_disagg.engine.engine_facts import EngineFacts
from trtllm_disagg.engine.handoffs_held import HandoffsHeld, lease_seconds_of
from trtllm_disagg.engine.image_inputs import ImageInputs, in_thread
from trtllm_disagg.engine.llm_api import LlmApi, RequestOutput, is_engine_end, translate
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
from trtllm_disagg.wire.images import require_appended

_CONTEXT_ONLY, _GENERATION_ONLY = "context_only", "generation_only"
#: DisaggScheduleStyle.GENERATION_FIRST, which older TensorRT-LLM lacks.
_GENERATION_FIRST = 1
_LONG_CONTEXT = 128 * 1024
_MAX_STRETCHED = 8
#: Seconds for the health check after a failed request; without an answer the engine counts as dead.
_CHECK_SECONDS = 2.0
_NO_AFFINITY = Affinity()
#: As in Dynamo's worker: health probes share no cached prefix with requests.
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
        """`max_seq_len`: None: unknown. `machine_id`: as for `use_machine_id`. `measures`: the engine returns
        performance metrics with each request. `lease_seconds`: how long it keeps unfetched KV. `abort_seconds`: the
        longest wait for an aborted request, since TensorRT-LLM never ends one from its queue. Raises ConfigError for
        arguments that the engine cannot serve.
        """
        self.api, self.llm, self.max_seq_len = api, llm, max_seq_len
        self.capabilities = Capabilities(llm)
        self.request_error = api.request_error
        self.handoffs = HandoffsHeld(lease_seconds)
        self.use_machine_id(machine_id)
        self._measures = measures
        self._reports_cached_prompts = REPORTS_CACHED_PROMPTS in self.capabilities
        self._takes_priorities = TAKES_PRIORITIES in self.capabilities
        self._abort_seconds = abort_seconds
        self._args = args = getattr(llm, "args", None)
        self.facts = EngineFacts.of(max_seq_len, args)
        self.num_ranks = num_ranks_of(args)
        #: For traces: the KV transport, and how much slower than real time the engine's clock runs.
        self.kv_transport = kv_transport_of(llm)
        #: For other workers: the transport, and the handles' version if there is one.
        self.kv_pairing: str | None = getattr(llm, "kv_pairing", self.kv_transport)
        self.time_scale: float = getattr(llm, "time_scale", 1.0)
        if self.num_ranks > 1 and (TAKES_RANKS not in self.capabilities or api.scheduling_params is None):
            raise ConfigError.bad_value("enable_attention_dp", True, f"false with this version of {api.name}")
        self._place = placement_of(api, self.num_ranks, affinity, args)
        #: Why the engine counts as dead; None: it is alive.
        self.death: str | None = None
        #: The error of a request that failed because the engine ended.
        self._reported_end: Exception | None = None
        #: Task that waits for the engine -> its RequestOutput.
        self._waiting: dict[asyncio.Future[Any], RequestOutput] = {}
        #: The running health check for failed requests.
        self._check: asyncio.Future[str | None] | None = None
        #: Number of ended requests, successful or not.
        self.num_ended = 0
        #: Number of running answers, without prefills for other workers.
        self.answering = InProgress()
        #: Loads images; None: requests with images are refused.
        self.images: ImageInputs | None = None
        #: Context of each prefill, called with its number of tokens; the prefill queue counts them.
        self.prefilling: Callable[[int], AbstractContextManager[None]] = lambda tokens: nullcontext()

    @classmethod
    def open(
        cls, api: LlmApi, engine_args: dict[str, Any], machine_id: int, affinity: Affinity = _NO_AFFINITY
    ) -> Engine:
        """Build the LLM. Blocks while the model loads."""
        llm = api.llm(**engine_args)
        return cls(
            api,
            llm,
            # An engine may have less room than it was asked for.
            min(filter(None, (engine_args.get("max_seq_len"), Capabilities(llm).max_seq_len)), default=None),
            machine_id,
            # Step metrics are useless without request metrics.
            measures=bool(engine_args.get("enable_iter_perf_stats")),
            lease_seconds=lease_seconds_of(engine_args),
            affinity=affinity,
        )

    def use_machine_id(self, machine_id: int) -> None:
        """Put this id into future handoff ids: in [0, 1021), unique among workers (`ModelNameGuard`)."""
        self.machine_id = machine_id
        self._make_id = self.api.id_maker(machine_id)

    @property
    def is_exact(self) -> bool:
        """A repeated request yields the same tokens, whatever else runs. TensorRT-LLM does not promise that."""
        return IS_EXACT in self.capabilities

    @property
    def longest_prompt(self) -> int:
        """Longer prompts are refused before they are unpacked."""
        # An engine that reports no length may stretch the model's positions.
        length: int | None = getattr(self.llm, "max_seq_len", None)
        return length or _MAX_STRETCHED * max(self.max_seq_len or 0, _LONG_CONTEXT)

    def start_agg(
        self, request: GenerateRequest, *, streaming: bool = True, max_tokens: int | None = None
    ) -> RequestOutput:
        """Start both phases of a request without images. `max_tokens` replaces the request's."""
        return self._start(request, None, streaming=streaming, max_tokens=max_tokens)

    def start_prefill(self, request: GenerateRequest) -> RequestOutput:
        """Start a prefill without images: the first token, and KV under a lease until fetched or released."""
        return self._start(request, self._context_only(request), streaming=False, max_tokens=1)

    async def started_agg(self, request: GenerateRequest, *, streaming: bool = True) -> RequestOutput:
        """`start_agg`, after the request's images are loaded. Raises InvalidRequestError if one cannot be loaded."""
        return await self._started(request, None, streaming=streaming)

    async def started_prefill(self, request: GenerateRequest) -> RequestOutput:
        """`start_prefill`, as `started_agg`."""
        return await self._started(request, self._context_only(request), streaming=False, max_tokens=1)

    def rendezvous(self, ctx_info_endpoint: str, ctx_dp_rank: int | None = None) -> Rendezvous:
        """A new id and the prefill engine's endpoint, which connect the two phases of a request."""
        return Rendezvous(self._make_id(), ctx_info_endpoint, ctx_dp_rank)

    @property
    def ctx_info_endpoint(self) -> str | None:
        """Where decode engines reach this one, or None."""
        if HAS_CONTEXT_ENDPOINT not in self.capabilities:
            return None
        return one_endpoint(self.llm.disaggregated_params["ctx_info_endpoint"])

    @property
    def ctx_dp_rank(self) -> int | None:
        """The attention-DP rank that prefills; None: decode asks all ranks."""
        rank: int | None = (getattr(self.llm, "disaggregated_params", None) or {}).get("ctx_dp_rank")
        return rank

    def start_decode(self, request: GenerateRequest) -> RequestOutput:
        """Start a decode with the prefill result or rendezvous. Raises HandoffRefusedError if it is unreadable."""
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

    def require_choices(self, request: GenerateRequest) -> None:
        """Raises InvalidRequestError for choices that this engine would refuse in one request."""
        sampling_params_of(self.api, request, None, self.max_seq_len)

    def needs_uncached_prompt(self, request: GenerateRequest) -> bool:
        """The request asks for its prompt's log probabilities, which the engine has only for tokens computed together:
        it may use no cached prefix, and be aborted only after its first output.
        """
        return request.output.prompt_logprobs is not None and not self._reports_cached_prompts

    def uncached(self, request: GenerateRequest) -> GenerateRequest:
        """The request for both phases of an attempt, with a cache salt of its own if it needs one."""
        return request.salted(secrets.token_hex(16)) if self.needs_uncached_prompt(request) else request

    def require_fit(self, request: GenerateRequest, *, computes_prompt: bool = True) -> None:
        """Raises InvalidRequestError. TensorRT-LLM's error for a long prompt would not blame the request."""
        if (why := self.facts.why_unfit(request, computes_prompt=computes_prompt)) is not None:
            raise InvalidRequestError(why)

    # -- health

    @property
    def fatal_error(self) -> BaseException | None:
        """TensorRT-LLM's recorded cause of death, or the one it sent to a request. Never blocks."""
        for place in (self.llm, getattr(self.llm, "_executor", None)):
            error: BaseException | None = getattr(place, "_fatal_error", None)
            if isinstance(error, BaseException):
                return error
        return self._reported_end

    def _note_end(self, error: Exception) -> None:
        if is_engine_end(error):
            self._reported_end = error

    def why_unhealthy(self) -> str | None:
        """What is wrong with the engine; None: healthy, or no health check. May block."""
        if (error := self.fatal_error) is not None:
            return f"{type(error).__name__}: {error}"
        check = getattr(self.llm, "_check_health", None)
        if not callable(check):
            check = getattr(getattr(self.llm, "_executor", None), "check_health", None)
        if not callable(check):
            return None
        try:
            return None if check() else "it reports that it is not healthy"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    async def is_alive(self) -> bool:
        """False if the engine is unhealthy, or does not answer in time."""
        if self.death is not None or self.fatal_error is not None:
            return False
        if self._check is None or self._check.done():
            # One thread for all failed requests, since the engine may block it.
            self._check = in_daemon_thread(self.why_unhealthy, "engine-check")
        try:
            return await asyncio.wait_for(asyncio.shield(self._check), _CHECK_SECONDS) is None
        except TimeoutError:
            return False

    def die(self, reason: str) -> None:
        """Declare the engine dead: its waiting requests end with WorkerLeavingError."""
        self.death = self.death or reason
        for waiting in list(self._waiting):
            waiting.cancel()

    def cancel_at_death(self, waiting: asyncio.Future[Any], result: RequestOutput) -> None:
        """Cancel `waiting`, which reads `result`, if the engine dies: TensorRT-LLM's results may block for ever."""
        self._waiting[waiting] = result
        waiting.add_done_callback(self._end)
        if self.death is not None:
            waiting.cancel()

    def abort(self, result: RequestOutput) -> None:
        """End the request, except on a dead engine, where TensorRT-LLM may block for ever."""
        if self.death is None and self.fatal_error is None:
            result.abort()
            if not result.finished:
                asyncio.get_running_loop().call_later(self._abort_seconds, self._wait_no_longer, result)

    def _wait_no_longer(self, result: RequestOutput) -> None:
        if result.finished:
            return
        for waiting in [waiting for waiting, read in self._waiting.items() if read is result]:
            waiting.cancel()
        # TensorRT-LLM keeps the result until its last response, which never comes for one from the queue. Dropping the
        # result would end some versions at a late response (executor/proxy.py `dispatch_result_task`).
        if (kept := getattr(result, "_generation_request", None)) is not None:
            kept.prompt_token_ids = []

    def _end(self, waiting: asyncio.Future[Any]) -> None:
        del self._waiting[waiting]
        if not waiting.cancelled():
            self.num_ended += 1

    def has_requests(self) -> bool:
        """Whether any task waits for a request. Thread-safe."""
        return bool(self._waiting)

    def tokens_so_far(self) -> dict[asyncio.Future[Any], int]:
        """Waiting task -> number of its request's tokens so far."""
        return {
            waiting: sum(len(output.token_ids) for output in result.outputs)
            for waiting, result in self._waiting.items()
        }

    async def finished(self, result: RequestOutput, on_failure: Callable[[], None] = lambda: None) -> None:
        """Wait for a request's end. Raises a DisaggError; `on_failure`: see EngineErrors."""
        async with EngineErrors(self, on_failure):
            waiting = asyncio.ensure_future(result.aresult())
            self.cancel_at_death(waiting, result)
            await waiting

    async def failure(self, error: Exception) -> DisaggError:
        """The DisaggError for a request that the engine failed with `error`."""
        self._note_end(error)
        if not await self.is_alive():
            return WorkerLeavingError(str(error))
        return translate(error, isinstance(error, self.request_error))

    async def probe(self, request: GenerateRequest) -> None:
        """Check that the engine can work: run a request, with one token unless it sets more."""
        salted = msgspec.structs.replace(request, cache_salt=request.cache_salt or _PROBE_SALT)
        max_tokens = None if request.stop.max_tokens else 1
        result = self.start_agg(salted, streaming=False, max_tokens=max_tokens)
        try:
            await self.finished(result)
        except asyncio.CancelledError:
            self.abort(result)
            raise

    async def is_idle(self) -> bool:
        """No request runs in the engine, and no KV waits for a decode. Handlers count their own requests."""
        if COUNTS_REQUESTS in self.capabilities:
            return int(self.llm.num_active_requests) == 0
        return self.handoffs.count() == 0

    def close(self) -> None:
        """May block for ever, as TensorRT-LLM waits for its ranks; `engine.health.close` limits that."""
        self.llm.shutdown()

    # -- internals

    def _context_only(self, request: GenerateRequest) -> Any:
        rendezvous = request.rendezvous
        return self.api.disaggregated_params(
            request_type=_CONTEXT_ONLY,
            disagg_request_id=self._make_id() if rendezvous is None else rendezvous.disagg_request_id,
            **({} if rendezvous is None else {"schedule_style": _GENERATION_FIRST}),
        )

    async def _started(self, request: GenerateRequest, params: Any, **options: Any) -> RequestOutput:
        """Also counts the tokens that images add to the prompt."""
        if (images := request.images) is None:
            return self._start(request, params, **options)
        assert self.images is not None  # else `decode_request` refuses the request
        async with self.images.of(request, images) as inputs:
            if (preprocess := getattr(self.llm, "preprocess", None)) is not None:
                # An image takes tenths of a second. The engine may write an image's positions into `params`.
                with self._refusals():
                    inputs = await in_thread(partial(preprocess, inputs, None, params))
            result = self._start(request, params, inputs, **options)
        images.num_added = len(result.prompt_token_ids) - len(request.token_ids)
        try:
            require_appended(request, result.prompt_token_ids)
        except EngineError:
            self.abort(result)
            raise
        return result

    def _start(
        self,
        request: GenerateRequest,
        params: Any,
        inputs: Any = None,
        *,
        streaming: bool,
        max_tokens: int | None = None,
    ) -> RequestOutput:
        """`inputs`: None: the request's tokens."""
        if self.death is not None:
            raise WorkerLeavingError(f"the engine is dead: {self.death}")
        if request.num_choices > 1:
            raise InvalidRequestError(f"n={request.num_choices}: each choice is a request; expected n=1")
        is_decode = getattr(params, "request_type", None) == _GENERATION_ONLY
        self.require_fit(request, computes_prompt=not is_decode)
        measures = self._measures or request.span.is_recording
        sampling = sampling_params_of(self.api, request, max_tokens, self.max_seq_len, measures=measures)
        optional = {
            "disaggregated_params": params,
            "cache_salt": request.cache_salt,
            "priority": request.priority if self._takes_priorities else None,
            "trace_headers": request.span.headers(request.trace_headers),
        }
        given = {name: value for name, value in optional.items() if value is not None} | self._place(request)
        with self._refusals():
            result: RequestOutput = self.llm.generate_async(
                inputs=inputs or request.token_ids, sampling_params=sampling, streaming=streaming, **given
            )
            return result

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raises InvalidRequestError if the engine refuses the request, WorkerLeavingError if the engine has ended."""
        try:
            yield
        except (self.request_error, ValueError, TypeError, NotImplementedError) as error:
            self._note_end(error)
            # The engine has not accepted the request: unless the engine has ended, the request is wrong.
            raise (WorkerLeavingError if self._is_over else InvalidRequestError)(str(error)) from error
        except Exception as error:
            self._note_end(error)
            is_over = self._is_over or "shutting down" in str(error)
            raise (WorkerLeavingError if is_over else EngineError)(str(error)) from error

    @property
    def _is_over(self) -> bool:
        """TensorRT-LLM has shut down. It does so if its process dies, and the next call raises the cause."""
        is_shutdown = getattr(getattr(self.llm, "_executor", None), "is_shutdown", None)
        return self.fatal_error is not None or (callable(is_shutdown) and bool(is_shutdown()))
