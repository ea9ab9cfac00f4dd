"""Request metrics of this project and of TensorRT-LLM's server, updated when a request ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.common.utils.prometheus import register_engine_metrics_callback
from dynamo.prometheus_names import labels, name_prefix, work_handler
from prometheus_client import CollectorRegistry, Counter, Histogram

from trtllm_disagg.config.settings import COMPONENTS, parse_endpoint_id
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.metrics import PREFIX, Labelled, LabelValues
from trtllm_disagg.errors import PeerUnavailableError
from trtllm_disagg.handlers.trace import RequestEnd
from trtllm_disagg.strategies import STRATEGIES, spec_of
from trtllm_disagg.types import Fallback

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_BYTES = tuple(4.0**power for power in range(6, 18))

_LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_DECADES = (0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
#: Key of TensorRT-LLM's `metrics_dict` -> (name, text, buckets), with TensorRT-LLM's buckets, so that both add up.
_ENGINE_HISTOGRAMS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {
    "e2e": ("e2e_request_latency_seconds", "From arrival in the engine to the last token", _LONG),
    "ttft": (
        "time_to_first_token_seconds",
        "From arrival in the engine to its first token",
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, *_DECADES, 160.0, 640.0, 2560.0),
    ),
    "tpot": (
        "time_per_output_token_seconds",
        "Mean time between tokens of a request",
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, *_DECADES),
    ),
    "request_queue_time": ("request_queue_time_seconds", "From arrival to the first step", _LONG),
    "prefill_time": (
        "request_prefill_time_seconds",
        "From the first step to the first token",
        (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560),
    ),
    "decode_time": ("request_decode_time_seconds", "From the first to the last token", _LONG),
    "inference_time": ("request_inference_time_seconds", "From the first step to the last token", _LONG),
}
_FINISHED_REASON = "finished_reason"

#: Values of the label `phase` besides the two phases: a frontend's request, and one that a first stage relayed, which
#: counts as whole there.
WHOLE, RELAYED = "whole", "relayed"

#: Dynamo's buckets for a worker's requests.
_DYNAMO_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class RequestMetrics:
    """Counts requests that end on this worker: frontends' whole requests, each on one worker only, relayed ones, and
    single phases. Series for rates exist from the start.
    """

    def __init__(
        self, from_frontends: str = WHOLE, *, decode_sends_all: bool = False, instance_id: int | None = None
    ) -> None:
        """`from_frontends`: the phase of a frontend's request (`phase_of_frontends`). `decode_sends_all`: the decode
        worker also sends the first token (generation_first). `instance_id`: this worker, which may take its own
        prefills from the prefill queue.
        """
        self._from_frontends = from_frontends
        self._decode_sends_all = decode_sends_all
        self._own_name = None if instance_id is None else f"{instance_id:x}"
        self.registry = CollectorRegistry()
        self._strategies = LabelValues(*STRATEGIES, "local")
        self._reasons, self._steps, self._causes = LabelValues(), LabelValues(), LabelValues()

        def counter(name: str, text: str, *names: str) -> Counter:
            return Counter(PREFIX + name, text, names, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *names: str) -> Histogram:
            return Histogram(PREFIX + name, text, names, registry=self.registry, buckets=buckets)

        ended = "Client requests that ended on this worker"
        self._requests = counter("requests", ended, "strategy", "reason", "fallback")
        self._fallbacks = counter("fallbacks", "Fallback steps", "to", "cause")
        first_tokens = counter("first_tokens", "First tokens of client requests, by source", "source")
        self._relayed = counter("relayed_tokens", "Tokens relayed from another worker to the frontend")
        left = "Requests cancelled by their client, by progress"
        self._cancelled = counter("cancelled", left, "phase", "point")
        arrived = "From arrival to the"
        seconds = histogram("request_seconds", f"{arrived} end", _SECONDS, "phase")
        first = histogram("first_chunk_seconds", f"{arrived} first tokens", _SECONDS, "phase")
        gap = "From the first to the next tokens; in two stages: handoff, KV transfer, first decode step"
        second = histogram("second_chunk_gap_seconds", gap, _SECONDS, "phase")
        self._transfer_seconds = histogram("kv_transfer_seconds", "KV transfer time per request", _SECONDS)
        self._transfer_bytes = histogram("kv_transfer_bytes", "KV received per request", _BYTES)
        phases = (WHOLE, RELAYED, "prefill", "decode")
        self._times = {phase: [each.labels(phase) for each in (seconds, first, second)] for phase in phases}
        for phase in phases:
            for point in CANCEL_POINTS:
                self._cancelled.labels(phase, point)
        self._first_tokens = {source: first_tokens.labels(source) for source in FIRST_TOKEN_SOURCES}
        for step in Fallback:
            self._fallbacks.labels(step, PeerUnavailableError.__name__)

    def ended(self, end: RequestEnd) -> None:
        trace = end.trace
        phase = self._phase(end)
        if trace.strategy and phase == WHOLE:
            self._requests.labels(
                self._strategies.bound(trace.strategy),
                self._reasons.bound(trace.reason or "none"),
                self._steps.bound(trace.steps[-1][0] if trace.steps else "none"),
            ).inc()
        for to, cause in trace.steps:
            self._fallbacks.labels(self._steps.bound(to), self._causes.bound(cause)).inc()
        if end.is_aborted:
            num_chunks = sum(each is not None for each in (end.first_chunk, end.second_chunk))
            self._cancelled.labels(phase, CANCEL_POINTS[num_chunks]).inc()
        seconds, first, second = self._times[phase]
        seconds.observe(end.seconds)
        if end.first_chunk is not None:
            first.observe(end.first_chunk)
            if phase == WHOLE:
                source = self._source(trace.facts)
                self._first_tokens[source].inc()
                if trace.facts.keys() & {"decode_instance", "first_stage"}:
                    # An answer without tokens has only the end chunk.
                    self._relayed.inc(max(0, end.num_tokens - (source == OWN_ENGINE)))
            if end.second_chunk is not None:
                second.observe(end.second_chunk - end.first_chunk)
        if end.transfer is not None:
            duration, num_bytes = end.transfer
            self._transfer_seconds.observe(duration)
            self._transfer_bytes.observe(num_bytes)

    def _source(self, facts: Mapping[str, Any]) -> str:
        if "first_stage" in facts:
            return "other_first_stage"
        if self._decode_sends_all:
            return "decode_worker" if "decode_instance" in facts else OWN_ENGINE
        is_own = facts.get("prefill_instance") in (None, self._own_name)
        return OWN_ENGINE if is_own else "prefill_worker"

    def _phase(self, end: RequestEnd) -> str:
        if end.request.phase_request is None:
            return self._from_frontends
        return RELAYED if end.phase == WHOLE else end.phase


def phase_of_frontends(config: WorkerConfig) -> str:
    """Under `router` a frontend asks a prefill worker only for its phase, without saying so."""
    is_half = config.role is Role.PREFILL and not spec_of(config.strategy).is_run_by_workers
    return "prefill" if is_half else WHOLE


#: By the number of sent chunks; 2 means at least two.
CANCEL_POINTS = ("before_first_token", "before_second_chunk", "streaming")
OWN_ENGINE = "own_engine"
FIRST_TOKEN_SOURCES = (OWN_ENGINE, "prefill_worker", "decode_worker", "other_first_stage")


class EngineRequestMetrics:
    """The engine's measurements of finished requests, under the names of TensorRT-LLM's server."""

    def __init__(self, model_name: str) -> None:
        ours = Labelled({"model_name": model_name, "engine_type": "trtllm"})
        self.registry = ours.registry
        self._histograms = {
            key: ours.histogram(f"trtllm_{name}", text, buckets)
            for key, (name, text, buckets) in _ENGINE_HISTOGRAMS.items()
        }
        self._tokens = {
            "prompt_tokens": ours.counter("trtllm_prompt_tokens", "Prompt tokens"),
            "generation_tokens": ours.counter("trtllm_generation_tokens", "Answer tokens"),
        }
        self._reasons = LabelValues("length", "stop", "cancelled")
        success, text = "trtllm_request_success", "Finished requests, by reason"
        self._finished = Counter(success, text, [*ours.labels, _FINISHED_REASON], registry=self.registry)
        self._mode = ours.labels.values()
        for reason in ("length", "stop"):
            self._finished.labels(*self._mode, reason)

    def ended(self, end: RequestEnd) -> None:
        # TensorRT-LLM's keys are enum members, except one string.
        measured = {str(getattr(key, "value", key)): value for key, value in end.trace.measured.items()}
        reason = measured.get(_FINISHED_REASON)
        if reason is None:
            return
        self._finished.labels(*self._mode, self._reasons.bound(str(reason))).inc()
        for key, histogram in self._histograms.items():
            if measured.get(key):
                histogram.observe(measured[key])
        for key, counter in self._tokens.items():
            counter.inc(measured.get(key) or (end.request.num_prompt if key == "prompt_tokens" else 0))


class FrontendRequests:
    """Counts frontends' requests under the component of this worker's role, as Dynamo's dashboards query them. Dynamo
    counts them under the component of the endpoint that both roles share.

    Without the label `model`, so that a sum over a model's requests counts each once.
    """

    def __init__(self, config: WorkerConfig, instance_id: int) -> None:
        here = {
            labels.NAMESPACE: parse_endpoint_id(config.frontend_endpoint_id).namespace,
            labels.COMPONENT: COMPONENTS[config.role],
            labels.ENDPOINT: "generate",
            labels.WORKER_ID: f"{instance_id:x}",
        }
        ours = Labelled(here)
        self.registry = ours.registry
        text = "Client requests at a first stage, by its role"
        prefix = name_prefix.COMPONENT
        self._requests = ours.counter(f"{prefix}_{work_handler.REQUESTS_TOTAL}", text)
        seconds = f"{prefix}_{work_handler.REQUEST_DURATION_SECONDS}"
        self._seconds = ours.histogram(seconds, text, _DYNAMO_SECONDS)

    def ended(self, end: RequestEnd) -> None:
        if end.request.phase_request is None:
            self._requests.inc()
            self._seconds.observe(end.seconds)

    def expose(self, endpoint: Any) -> None:
        # Dynamo's page already has these metrics' HELP and TYPE lines, which may appear only once.
        register_engine_metrics_callback(endpoint, self.registry, exclude_prefixes=["# "])
