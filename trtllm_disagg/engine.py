"""Picks the module that offers the LLM API, builds its LLM, and asks it. No handler knows which one it is."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_disagg.engines import ENGINES
from trtllm_disagg.errors import ConfigError, EngineError, InvalidRequestError, WorkerLeavingError
from trtllm_disagg.types import GenerateRequest, Rendezvous, SamplingOptions
from trtllm_disagg.wire import decode_disaggregated_params

log = logging.getLogger(__name__)

_CONTEXT_ONLY, _GENERATION_ONLY = "context_only", "generation_only"
#: DisaggScheduleStyle.GENERATION_FIRST; older TensorRT-LLM has no such name.
_GENERATION_FIRST = 1
_DEFAULT_MAX_POSITIONS = 2048
_LONG_CONTEXT = 128 * 1024
_MOST_STRETCHED = 8


@dataclass(frozen=True, slots=True)
class LlmApi:
    """The names that we use of the chosen module."""

    name: str
    llm: Callable[..., Any]
    sampling_params: Callable[..., Any]
    guided_decoding_params: Callable[..., Any]
    disaggregated_params: Callable[..., Any]
    logprob: Callable[..., Any]
    request_error: type[Exception]
    new_disagg_request_id: Callable[..., int]


def load_api(name: str) -> LlmApi:
    """Raise ConfigError when the engine is not installed."""
    try:
        if missing := ENGINES[name].missing():
            raise ModuleNotFoundError(f"No module named {missing!r}")
        module = importlib.import_module(ENGINES[name].module)
    except ModuleNotFoundError as error:
        allowed = f"an engine that is installed ({error}; pip install 'trtllm-disagg[{ENGINES[name].extra}]')"
        raise ConfigError.bad_value("--engine", name, allowed) from error
    if ENGINES[name].is_flat:
        parts: tuple[Any, ...] = (module,) * 4
    else:
        parts = tuple(
            importlib.import_module(f"tensorrt_llm.{part}")
            for part in ("sampling_params", "executor.result", "executor.utils", "llmapi.disagg_utils")
        )
    sampling, result, utils, ids = parts
    return LlmApi(
        name=name,
        llm=module.LLM,
        sampling_params=module.SamplingParams,
        guided_decoding_params=sampling.GuidedDecodingParams,
        disaggregated_params=module.DisaggregatedParams,
        logprob=result.Logprob,
        request_error=utils.RequestError,
        new_disagg_request_id=ids.get_global_disagg_request_id,
    )


def serve_as_rank(name: str, args: dict[str, Any]) -> bool:
    """Under mpiexec, on every rank but rank 0: take part in its engine until that ends, then True. Blocks.

    Raises ConfigError when the job has another number of ranks.
    """
    server = ENGINES[name].rank_server
    if server is None:
        return False
    module, _, function = server.partition(":")
    serve = getattr(importlib.import_module(module), function)
    own = args.get("embedded") or {}
    served: bool = serve(args.get("tensor_parallel_size") or 1, own.get("num_threads") or 1, os.environ)
    return served


class Engine:
    """One running LLM. The three `start_*` methods return its RequestOutput; none of them waits."""

    def __init__(
        self, api: LlmApi, llm: Any, max_seq_len: int, machine_id: int = 0, *, measures: bool = False
    ) -> None:
        """`machine_id` in [0, 1021) tells this worker's handoff ids from the other workers'. `measures`: have the
        engine say of each request what it took.
        """
        self._api = api
        self.llm = llm
        self.max_seq_len = max_seq_len
        self.request_error = api.request_error
        self._id_parts = divmod(machine_id, 64)
        self._measures = measures

    @classmethod
    def open(cls, api: LlmApi, engine_args: dict[str, Any], machine_id: int) -> Engine:
        """Build the LLM: loads the model, so it takes its time and blocks."""
        args = dict(engine_args)
        llm = api.llm(**args)
        max_seq_len = args.get("max_seq_len") or _max_positions(args["model"])
        # Metrics of steps without those of requests are of no use.
        return cls(api, llm, max_seq_len, machine_id, measures=bool(args.get("enable_iter_perf_stats")))

    @property
    def is_exact(self) -> bool:
        """It gives the same tokens when it is asked again, whatever else it runs. TensorRT-LLM does not say so."""
        return bool(getattr(self.llm, "is_exact", False))

    @property
    def longest_prompt(self) -> int:
        """Tokens above which no prompt needs to be looked at."""
        told: int | None = getattr(self.llm, "max_seq_len", None)
        # An engine that does not tell may stretch a model's positions.
        return told or _MOST_STRETCHED * max(self.max_seq_len, _LONG_CONTEXT)

    def start_both(self, request: GenerateRequest) -> Any:
        return self._start(request, None, streaming=True)

    def start_prefill(self, request: GenerateRequest) -> Any:
        met = request.rendezvous
        params = self._api.disaggregated_params(
            request_type=_CONTEXT_ONLY,
            disagg_request_id=self._new_id() if met is None else met.disagg_request_id,
            **({} if met is None else {"schedule_style": _GENERATION_FIRST}),
        )
        return self._start(request, params, streaming=False, max_tokens=1)

    def rendezvous(self, ctx_info_endpoint: list[str]) -> Rendezvous:
        """A place for the two phases of one request to meet: at a prefill engine."""
        return Rendezvous(self._new_id(), ctx_info_endpoint)

    @property
    def ctx_info_endpoint(self) -> list[str]:
        """Where decode engines find this one; empty when it cannot be met."""
        said = getattr(self.llm, "disaggregated_params", None) or {}
        return list(said.get("ctx_info_endpoint") or ())

    def start_decode(self, request: GenerateRequest, max_tokens: int | None = None) -> Any:
        """The prefill result, or the rendezvous, says where the KV is. Raises HandoffRefusedError if it is
        unreadable.
        """
        if request.rendezvous is not None:
            return self._start(request, self._met(request.rendezvous), streaming=True, max_tokens=max_tokens)
        if request.prefill_result is None:
            raise InvalidRequestError("a decode worker needs a prefill result, and this request has none")
        params = decode_disaggregated_params(
            request.prefill_result, self._api.disaggregated_params, self._api.logprob
        )
        return self._start(request, params, streaming=True, max_tokens=max_tokens)

    @property
    def is_healthy(self) -> bool:
        """False once the engine is dead. Engines that cannot tell count as healthy."""
        check = getattr(self.llm, "_check_health", None)
        return bool(check()) if callable(check) else True

    async def is_idle(self) -> bool:
        """Nothing runs, and no finished prefill's KV waits to be fetched."""
        if hasattr(self.llm, "num_active_requests"):
            return int(self.llm.num_active_requests) == 0
        newest: dict[str, Any] = {}
        async for stat in self.llm.get_stats_async(timeout=1):
            newest = stat
        return not newest.get("numActiveRequests") and not newest.get("numQueuedRequests")

    def close(self) -> None:
        self.llm.shutdown()

    # -- internals

    def _new_id(self) -> int:
        return self._api.new_disagg_request_id(*self._id_parts)

    def _met(self, rendezvous: Rendezvous) -> Any:
        return self._api.disaggregated_params(
            request_type=_GENERATION_ONLY,
            ctx_request_id=rendezvous.disagg_request_id,
            disagg_request_id=rendezvous.disagg_request_id,
            ctx_info_endpoint=rendezvous.ctx_info_endpoint,
            schedule_style=_GENERATION_FIRST,
        )

    def _start(
        self, request: GenerateRequest, params: Any, *, streaming: bool, max_tokens: int | None = None
    ) -> Any:
        """Raise InvalidRequestError when the engine refuses the request, EngineError when it fails,
        WorkerLeavingError when it is dead or closed.
        """
        keywords: dict[str, Any] = {
            "inputs": request.token_ids,
            "sampling_params": self._sampling_params(request, max_tokens),
            "streaming": streaming,
        }
        optional = {
            "disaggregated_params": params,
            "cache_salt": request.cache_salt,
            "priority": request.priority,
        }
        keywords |= {name: value for name, value in optional.items() if value is not None}
        try:
            return self.llm.generate_async(**keywords)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InvalidRequestError(str(error)) from error
        except RuntimeError as error:
            raise (EngineError if self.is_healthy else WorkerLeavingError)(str(error)) from error

    def _sampling_params(self, request: GenerateRequest, max_tokens: int | None) -> Any:
        options = _set_options(request.sampling)
        # -1 is OpenAI's way to say "no limit"; TensorRT-LLM's is 0.
        if options.get("top_k") == -1:
            options["top_k"] = 0
        guided = options.pop("guided_decoding", None) or {}
        stop = request.stop
        ignore_eos = bool(stop.ignore_eos or stop.stop_token_ids_visible)
        stop_ids = [] if ignore_eos else [*(stop.stop_token_ids or ()), *(stop.stop_token_ids_hidden or ())]
        room = max(1, self.max_seq_len - len(request.token_ids))
        try:
            return self._api.sampling_params(
                max_tokens=max_tokens or (room if stop.max_tokens is None else stop.max_tokens),
                min_tokens=stop.min_tokens,
                ignore_eos=ignore_eos,
                stop_token_ids=stop_ids or None,
                logprobs=None if request.output.logprobs is None else max(1, request.output.logprobs),
                # Dynamo's frontend makes the text.
                detokenize=False,
                guided_decoding=self._guided(guided),
                return_perf_metrics=self._measures,
                **options,
            )
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(str(error)) from error

    def _guided(self, guided: dict[str, Any]) -> Any:
        known = ("json", "regex", "grammar", "json_object", "structural_tag")
        # An empty schema is one: any JSON.
        chosen = {name: guided[name] for name in known if guided.get(name) not in (None, False, "")}
        if guided.get("choice"):
            # TensorRT-LLM has no choice of its own.
            chosen.setdefault("regex", "(" + "|".join(map(re.escape, guided["choice"])) + ")")
        if isinstance(chosen.get("structural_tag"), dict):
            chosen["structural_tag"] = json.dumps(chosen["structural_tag"])
        return self._api.guided_decoding_params(**chosen) if chosen else None


def _set_options(sampling: SamplingOptions) -> dict[str, Any]:
    return {
        name: value for name in sampling.__struct_fields__ if (value := getattr(sampling, name)) is not None
    }


def _max_positions(model: str) -> int:
    """A model directory's max_position_embeddings; a modest guess for a model that is not a directory."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return _DEFAULT_MAX_POSITIONS
    return int(json.loads(path.read_text()).get("max_position_embeddings") or _DEFAULT_MAX_POSITIONS)
