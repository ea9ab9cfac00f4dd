"""The rules for a pair of TensorRT-LLM workers: one function or one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trtllm_disagg.config.image_checks import FLAG as IMAGES_FLAG
from trtllm_disagg.config.image_checks import image_errors, image_warnings, model_type_of
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.engine.health import stall_seconds
from trtllm_disagg.engine.trtllm_version import (
    NEWEST_KNOWN,
    OLDEST_SERVED,
    PYTHON_TRANSCEIVER_BY_DEFAULT,
    PYTHON_UNLESS_GIVEN,
    TRANSFERS_END_BY_DEFAULT,
)
from trtllm_disagg.strategies import STRATEGIES
from trtllm_disagg.tools.doctor.pair import DEFAULT_BLOCK_SIZE, Pair, Stage
from trtllm_disagg.tools.up.workers import lacking_parsers
from trtllm_disagg.worker.flips import Misfit, graphs_misfit, overlap_misfit, unmet_by_prefill
from trtllm_disagg.worker.pairing import BY_KEY, fixed_by

#: The verdict of a rule that holds, and of one that could not be checked.
FINE, UNKNOWN = "ok", "not known"


class Severity(StrEnum):
    #: The pair fails to start, loses requests, or answers wrongly.
    ERROR = "error"
    #: The pair works; advice.
    NOTE = "note"


class Problem(NamedTuple):
    severity: Severity
    #: What to write or check instead.
    instead: str


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one rule."""

    rule: str
    verdict: str
    #: Column -> value, for the table.
    values: Mapping[str, Any]
    why: str
    #: What to do; empty for ok.
    instead: str = ""


class Row(NamedTuple):
    """Makes the findings of one rule that checks running processes or the machine, not files."""

    name: str
    why: str

    def fine(self, value: str) -> Finding:
        return Finding(self.name, FINE, {"value": value}, self.why)

    def note(self, value: str, instead: str) -> Finding:
        return Finding(self.name, Severity.NOTE.value, {"value": value}, self.why, instead)

    def error(self, value: str, instead: str) -> Finding:
        return Finding(self.name, Severity.ERROR.value, {"value": value}, self.why, instead)

    def unknown(self, instead: str) -> Finding:
        return Finding(self.name, UNKNOWN, {"value": ""}, self.why, instead)


Check = Callable[[Pair], Problem | None]


class Rule(NamedTuple):
    name: str
    why: str
    #: A worker's value in the table.
    value: Callable[[Stage], Any]
    check: Check
    #: Only for pairs with two transceivers; the row `transceiver` reports a missing one.
    of_transceivers: bool = False

    def problem(self, pair: Pair) -> Problem | None:
        has_both = all(stage.fingerprint.transceiver is not None for stage in pair.stages)
        return self.check(pair) if has_both or not self.of_transceivers else None


#: In the order of the table.
RULES: list[Rule] = []


def _rule(
    name: str, value: Callable[[Stage], Any], why: str = "", *, of_transceivers: bool = False
) -> Callable[[Check], Check]:
    """Adds a check to RULES. `why` or the check's docstring says why it matters."""

    def add(check: Check) -> Check:
        reason = why or " ".join((check.__doc__ or "").split())
        RULES.append(Rule(name, reason, value, check, of_transceivers))
        return check

    return add


def _error(instead: str) -> Problem:
    return Problem(Severity.ERROR, instead)


def _note(instead: str) -> Problem:
    return Problem(Severity.NOTE, instead)


@_rule("keys", lambda stage: ", ".join(bad.key for bad in stage.bad_keys) or "all known")
def _keys(pair: Pair) -> Problem | None:
    """TensorRT-LLM refuses unknown keys and values only after minutes of loading"""
    found = [(stage, bad) for stage in pair.stages for bad in stage.bad_keys]
    wrong = [
        f"{stage.role}: {bad.key}: {bad.value!r}: expected {bad.instead}"
        for stage, bad in found
        if bad.instead
    ]
    if wrong:
        return _error("; ".join(wrong))
    new = [f"{stage.role}: {bad.key}" for stage, bad in found]
    if new:
        return _note(f"{', '.join(new)} is not an argument of TensorRT-LLM {NEWEST_KNOWN}")
    return None


@_rule("flags", lambda stage: f"{len(stage.overruled)} overruled" if stage.overruled else "")
def _flags(pair: Pair) -> Problem | None:
    """the file overrules the flags, also in the worker"""
    overruled = [f"{stage.role}: {sentence}" for stage in pair.stages for sentence in stage.overruled]
    return _note("; ".join(overruled)) if overruled else None


#: Flags that must be equal on both workers. Engine arguments have their own rules.
_COMMON = ("strategy", "schedule_style", "handoff_protocol", "prefill_dispatch")


@_rule("strategy", lambda stage: f"{stage.config.strategy}, {stage.config.schedule_style}")
def _settings(pair: Pair) -> Problem | None:
    """workers call each other and read answers by these"""
    unequal = [
        BY_KEY[key].setting
        for key in _COMMON
        if getattr(pair.prefill.config, key) != getattr(pair.decode.config, key)
    ]
    return _error(f"the same {', '.join(unequal)} on both workers") if unequal else None


@_rule("TensorRT-LLM", lambda stage: stage.fingerprint.trtllm_version)
def _version(pair: Pair) -> Problem | None:
    """older versions number handoffs differently, so every disaggregated request would fail"""
    version = pair.trtllm_version
    if version < OLDEST_SERVED:
        return _error(f"TensorRT-LLM {OLDEST_SERVED} or newer; ai-dynamo 1.6.1 has {NEWEST_KNOWN}")
    if version > NEWEST_KNOWN:
        return _note(f"these rules know TensorRT-LLM up to {NEWEST_KNOWN}")
    return None


@_rule("transceiver", lambda stage: stage.fingerprint.transceiver or "off")
def _transceiver(pair: Pair) -> Problem | None:
    """without cache_transceiver_config.backend, KV cannot leave the engine"""
    if without := _roles(pair, lambda stage: stage.fingerprint.transceiver is None):
        return _error(f"{without}: cache_transceiver_config: {{backend: NIXL}}")
    if silent := _roles(pair, lambda stage: not stage.gave("cache_transceiver_config", "backend")):
        return _note(f"{silent}: set backend: without it, DEFAULT here and no transceiver in dynamo.trtllm")
    return None


def _equal(key: str, instead: str) -> Check:
    def check(pair: Pair) -> Problem | None:
        fits = BY_KEY[key].fits(pair.prefill.described, pair.decode.described)
        return None if fits else _error(instead)

    return check


def _same(value: Callable[[Stage], Any], what: str) -> Check:
    return lambda pair: (
        None if value(pair.prefill) == value(pair.decode) else _error(f"the same {what} on both workers")
    )


def _roles(pair: Pair, are: Callable[[Stage], bool]) -> str:
    """The roles of the workers for which `are` holds: "prefill and decode", one of them, or empty."""
    return " and ".join(stage.role.value for stage in pair.stages if are(stage))


@_rule("backend", lambda stage: stage.fingerprint.transceiver, of_transceivers=True)
def _backend(pair: Pair) -> Problem | None:
    """each worker speaks only its own backend's protocol; MPI needs both workers in one MPI job"""
    if problem := _equal("transceiver", "the same cache_transceiver_config.backend on both workers")(pair):
        return problem
    if pair.prefill.fingerprint.transceiver == "MPI":
        return _error("cache_transceiver_config.backend: NIXL or UCX on both workers")
    given = {_in_transceiver(stage, "backend") for stage in pair.stages} - {None}
    if "DEFAULT" in given and len(given) > 1:
        return _note("DEFAULT depends on each host's TRTLLM_USE_*_KVCACHE; name the backend on both workers")
    return None


@_rule("transceiver_runtime", lambda stage: stage.fingerprint.transceiver_runtime, of_transceivers=True)
def _runtime(pair: Pair) -> Problem | None:
    """the C++ and Python transceivers are incompatible; only PYTHON supports generation first, and only over NIXL"""
    prefill, decode = (stage.fingerprint.transceiver_runtime for stage in pair.stages)
    if pair.schedule_style == "generation_first" and "CPP" in (prefill, decode):
        return _error("transceiver_runtime: PYTHON on both workers, with backend NIXL")
    if problem := _equal("transceiver_runtime", "the same transceiver_runtime on both workers")(pair):
        return problem
    if prefill != decode:
        return _note("each worker resolves auto alone; name the same transceiver_runtime on both workers")
    silent = _roles(pair, lambda stage: not stage.gave("cache_transceiver_config", "transceiver_runtime"))
    if silent and pair.prefill.fingerprint.transceiver != "NIXL":
        say = _error if prefill == "PYTHON" else _note
        return say(
            f"{silent}: transceiver_runtime: CPP; PYTHON, the default of 1.4 and some models, needs NIXL"
        )
    managers = {stage.args.kv_cache_config.use_kv_cache_manager_v2 for stage in pair.stages}
    is_deprecated = pair.trtllm_version >= PYTHON_UNLESS_GIVEN
    if prefill == "CPP" and (True in managers or (is_deprecated and managers != {False})):
        return _error("both: kv_cache_config.use_kv_cache_manager_v2: false, with which alone CPP works")
    if prefill == "CPP" and is_deprecated:
        return _note("backend: NIXL and transceiver_runtime: PYTHON on both workers; 1.4 deprecates CPP")
    return None


def _in_transceiver(stage: Stage, key: str, default: Any = None) -> Any:
    """The value of cache_transceiver_config.`key`; `default` without a transceiver."""
    return getattr(stage.args.cache_transceiver_config, key, default)


def _pipelines(stage: Stage) -> bool:
    return bool(_in_transceiver(stage, "enable_pipelined_transfer"))


@_rule("pipelined transfer", lambda stage: "on" if _pipelines(stage) else "off", of_transceivers=True)
def _pipelined(pair: Pair) -> Problem | None:
    """TensorRT-LLM sends the KV of finished chunks only under these conditions, and refuses others after loading"""
    if not any(map(_pipelines, pair.stages)):
        return None
    prefill, decode = pair.stages
    caches = [stage.args.kv_cache_config for stage in pair.stages]
    policies = {each.block_reuse_config.policy for each in caches if each.enable_block_reuse}
    conditions = {
        "--schedule-style generation_first": pair.schedule_style == "generation_first",
        "prefill: enable_chunked_prefill: true": prefill.args.enable_chunked_prefill,
        "transceiver_runtime: PYTHON": "CPP" not in [s.fingerprint.transceiver_runtime for s in pair.stages],
        "pipeline_parallel_size: 1": prefill.args.pipeline_parallel_size
        == decode.args.pipeline_parallel_size
        == 1,
        "kv_cache_bounce_size_mb: 0": not any(map(_bounce_of, pair.stages)),
        "block_reuse_config.policy: all_reusable": policies <= {"all_reusable"},
    }
    unmet = [condition for condition, is_met in conditions.items() if not is_met]
    return _error(f"{', '.join(unmet)}; or enable_pipelined_transfer: false") if unmet else None


def _bounce_of(stage: Stage) -> int:
    return int(_in_transceiver(stage, "kv_cache_bounce_size_mb", 0))


@_rule("kv_cache_bounce_size_mb", _bounce_of, of_transceivers=True)
def _bounce(pair: Pair) -> Problem | None:
    """if both workers have this buffer, the Python transceiver gathers scattered blocks in it"""
    if _bounce_of(pair.prefill) != _bounce_of(pair.decode):
        return _note("the same kv_cache_bounce_size_mb on both workers, or neither uses the buffer")
    return None


_buffer_of = partial(_in_transceiver, key="max_tokens_in_buffer")
_BUFFER_KEY = "cache_transceiver_config.max_tokens_in_buffer"
#: A prompt larger than the buffer gets one of its own, from which only these two backends can send
#: (batch_manager/baseTransBuffer.cpp; executor/cache_transmission/agent_utils/connection.cpp).
_TAKES_ANY_MEMORY = ("UCX", "MPI")


def _is_cpp(stage: Stage, pair: Pair) -> bool:
    """True if certain: CPP, or an `auto` that an older version resolves to it."""
    has_python = pair.trtllm_version >= PYTHON_TRANSCEIVER_BY_DEFAULT
    return stage.fingerprint.transceiver_runtime != "PYTHON" and not (has_python and _is_auto(stage))


def _is_auto(stage: Stage) -> bool:
    return stage.fingerprint.transceiver_runtime == "auto"


def _is_too_small(stage: Stage, longest: int | None) -> bool:
    """Whether the longest prompt exceeds the buffer. For the Python transceiver, 0 means no limit."""
    buffer: int | None = _buffer_of(stage)
    if buffer is None:
        return False
    if buffer == 0:
        return stage.fingerprint.transceiver_runtime != "PYTHON"
    return longest is not None and buffer < longest


@_rule("max_tokens_in_buffer", _buffer_of, of_transceivers=True)
def _buffer(pair: Pair) -> Problem | None:
    """the C++ transceiver sends KV through this buffer, so longer prompts fail on NIXL; the Python one sends parts"""

    def fails(stage: Stage) -> bool:
        return is_small(stage) and stage.fingerprint.transceiver not in _TAKES_ANY_MEMORY

    def is_small(stage: Stage) -> bool:
        return _is_too_small(stage, pair.prefill.longest)

    def is_broken(stage: Stage) -> bool:
        return _is_cpp(stage, pair) and bool((_buffer_of(stage) or 0) % stage.fingerprint.block_size)

    if broken := _roles(pair, is_broken):
        return _error(f"{broken}: {_BUFFER_KEY}: a multiple of tokens_per_block, or no engine starts")
    enough = f"{_BUFFER_KEY}: {pair.prefill.longest or 'at least the longest prompt'}"
    if losing := _roles(pair, lambda stage: fails(stage) and _is_cpp(stage, pair)):
        return _error(f"{losing}: {enough}")
    if unsure := _roles(pair, lambda stage: fails(stage) and _is_auto(stage)):
        return _note(
            f"{unsure}: {enough}, or transceiver_runtime: PYTHON; if auto resolves to CPP, longer prompts fail"
        )
    if small := _roles(pair, is_small):
        return _note(f"{small}: {enough}: longer prompts come through, slower or with less room for others")
    if any(_buffer_of(stage) is None for stage in pair.stages):
        return _note(
            "give both workers max_tokens_in_buffer of at least the longest prompt, as TensorRT-LLM's guide says; "
            "the C++ default is 512 MB (TRTLLM_KVCACHE_TRANSFER_BUFFER_SIZE)"
        )
    return None


def _timeout_of(stage: Stage) -> str:
    is_given = stage.gave("cache_transceiver_config", "kv_transfer_timeout_ms")
    return str(_in_transceiver(stage, "kv_transfer_timeout_ms", "unset")) if is_given else "unset"


@_rule("kv_transfer_timeout_ms", _timeout_of, of_transceivers=True)
def _timeout(pair: Pair) -> Problem | None:
    """prefill holds unfetched KV until this timeout; without one, forever"""
    is_endless = {"None"} if pair.trtllm_version >= TRANSFERS_END_BY_DEFAULT else {"None", "unset"}
    if endless := _roles(pair, lambda stage: _timeout_of(stage) in is_endless):
        return _error(f"{endless}: cache_transceiver_config.kv_transfer_timeout_ms: 60000")
    if _timeout_of(pair.prefill) != _timeout_of(pair.decode):
        return _note("the same kv_transfer_timeout_ms on both workers, or one gives up while the other waits")
    return None


@_rule("overlap scheduler", lambda stage: "off" if stage.args.disable_overlap_scheduler else "on")
def _overlap(pair: Pair) -> Problem | None:
    """older TensorRT-LLM refuses context_only requests with the overlap scheduler"""
    if instead := unmet_by_prefill(pair.prefill.described).get("overlap_scheduler"):
        return _error(f"prefill: {instead}")
    return _note_of_decode(overlap_misfit(pair.decode.settings))


def _window_of(stage: Stage) -> str:
    window = stage.args.kv_cache_config.max_attention_window
    return "model's" if window is None else str(window)


_rule(
    "KV dtype",
    lambda stage: stage.fingerprint.kv_dtype,
    "KV is copied as bytes, so both must read the same dtype",
)(
    _equal(
        "kv_dtype",
        "the same kv_cache_config.dtype on both workers (`auto` is the model's: give --model to resolve it)",
    )
)

_rule("dtype", lambda stage: stage.fingerprint.dtype, "`auto` KV has this dtype")(
    _equal("dtype", "the same dtype on both workers")
)

_rule("attention window", _window_of, "it sets the KV pool's layout of each layer")(
    _same(_window_of, "kv_cache_config.max_attention_window")
)


@_rule("tokens_per_block", lambda stage: stage.fingerprint.block_size)
def _block_size(pair: Pair) -> Problem | None:
    """blocks are the unit of transfer, reuse and routing"""
    prefill, decode = (stage.fingerprint.block_size for stage in pair.stages)
    if prefill != decode:
        return _error(f"kv_cache_config.tokens_per_block: {prefill} on both workers")
    wanted = pair.kv_block_size
    if wanted is not None and wanted != prefill:
        return _error(
            f"--kv-block-size {prefill}, for the router too; or tokens_per_block: {wanted} on both workers"
        )
    if wanted is None and prefill != DEFAULT_BLOCK_SIZE:
        return _note(f"the router must count in blocks of {prefill} too: give it --kv-block-size {prefill}")
    return None


@_rule(
    "KV events", lambda stage: "reuse on" if stage.args.kv_cache_config.enable_block_reuse else "reuse off"
)
def _reuse(pair: Pair) -> Problem | None:
    """the frontend routes by the blocks that workers report"""

    def streams(stage: Stage) -> bool:
        events = stage.args.kv_cache_config.kv_events_config
        return events is not None and bool(events.enable_kv_cache_events)

    routed = STRATEGIES[pair.strategy].kv_routed_roles
    if streaming := _roles(pair, streams):
        return _error(
            f"{streaming}: remove kv_events_config: the worker polls KV events itself (--publish-kv-events)"
        )
    if blind := _roles(
        pair,
        lambda stage: (
            stage.role.value in routed
            and not stage.args.kv_cache_config.enable_block_reuse
            and not (stage.role is Role.DECODE and stage.config.images)
        ),
    ):
        return _note(f"{blind}: enable_block_reuse: true, or KV routing finds no blocks")
    return None


def _images_of(stage: Stage) -> str:
    return ", ".join(filter(None, ("on", model_type_of(stage.model)[0]))) if stage.config.images else "off"


@_rule("images", _images_of)
def _images(pair: Pair) -> Problem | None:
    """TensorRT-LLM's decode worker knows blocks by text alone, not by their images"""
    if pair.prefill.config.images and not pair.decode.config.images:
        return _error(f"decode: {IMAGES_FLAG}, which checks its engine")
    errors, doubts = (
        [f"{stage.role}: {each}" for stage in pair.stages for each in judge(stage.config, stage.arguments)]
        for judge in (image_errors, image_warnings)
    )
    return _error("; ".join(errors)) if errors else _note("; ".join(doubts)) if doubts else None


@_rule("max_beam_width", lambda stage: stage.args.max_beam_width)
def _beams(pair: Pair) -> Problem | None:
    """a handoff carries the KV of one beam"""
    wide = _roles(pair, lambda stage: stage.args.max_beam_width != 1)
    return _error(f"{wide}: max_beam_width: 1") if wide else None


_rule(
    "speculative decoding",
    lambda stage: stage.fingerprint.speculative or "off",
    "draft layers have their own KV, and a handoff carries the first draft tokens",
)(
    _equal(
        "speculative",
        "the same speculative_config on both workers, or on the Python transceiver at decode only",
    )
)


@_rule("host_cache_size", lambda stage: f"{_host_cache(stage) >> 30} GiB" if _host_cache(stage) else "off")
def _offload(pair: Pair) -> Problem | None:
    """only block reuse finds blocks again that moved to host memory"""
    if unused := _roles(
        pair, lambda stage: _host_cache(stage) > 0 and not stage.args.kv_cache_config.enable_block_reuse
    ):
        return _error(f"{unused}: enable_block_reuse: true, or no host_cache_size")
    if _host_cache(pair.decode) and not _host_cache(pair.prefill):
        return _note(
            "prefill: host_cache_size: prefill computes the prompts; decode looks up only those that stay local"
        )
    return None


def _host_cache(stage: Stage) -> int:
    return stage.args.kv_cache_config.host_cache_size or 0


#: Published recipes count the answer in max_seq_len, but not in max_num_tokens.
_SLIGHTLY = 1.25


@_rule(
    "max_num_tokens",
    lambda stage: f"{stage.args.max_num_tokens}{', chunked' if stage.args.enable_chunked_prefill else ''}",
)
def _steps(pair: Pair) -> Problem | None:
    """without chunking, TensorRT-LLM refuses prompts above max_num_tokens"""
    args, longest = pair.prefill.args, pair.prefill.longest
    if args.enable_chunked_prefill or (longest is not None and longest <= args.max_num_tokens):
        return None
    if longest is None:
        return _note(
            "prefill: max_seq_len is the model's; enable_chunked_prefill: true, or max_num_tokens of the longest prompt"
        )
    say = _note if longest <= _SLIGHTLY * args.max_num_tokens else _error
    beyond = f"prompts above {args.max_num_tokens} tokens are refused"
    return say(f"prefill: enable_chunked_prefill: true, or max_num_tokens: {longest}; {beyond}")


@_rule("max_seq_len", lambda stage: stage.fingerprint.max_seq_len or "model's")
def _lengths(pair: Pair) -> Problem | None:
    """decode must have room for every prompt that prefill accepts"""
    prefill, decode = (stage.longest for stage in pair.stages)
    if prefill is not None and decode is not None and prefill > decode:
        return _error(f"decode: max_seq_len: {prefill}")
    if beyond := _roles(pair, lambda stage: stage.fingerprint.max_seq_len != stage.longest):
        longest = next(
            stage.longest for stage in pair.stages if stage.fingerprint.max_seq_len != stage.longest
        )
        return _note(f"{beyond}: max_seq_len: {longest}, the model's own, to which TensorRT-LLM lowers it")
    return None


@_rule("switch", lambda stage: ", ".join(fixed_by(stage.config)))
def _switch(pair: Pair) -> Problem | None:
    """a switch swaps the first stage, and the frontend keeps one context length per model"""
    if flags := ", ".join(flag for stage in pair.stages for flag in fixed_by(stage.config)):
        return _note(f"this pair cannot be switched; to switch it, leave out {flags}")
    prefill, decode = (stage.longest for stage in pair.stages)
    if prefill is None or decode is None or prefill >= decode:  # a longer prefill is an error
        return None
    return _note(
        f"this pair cannot be switched; to switch it, set the same max_seq_len on both workers: prompts above "
        f"{prefill} tokens do not fit the prefill worker"
    )


@_rule("model", lambda stage: stage.model or "not given")
def _model(pair: Pair) -> Problem | None:
    """KV is only valid for its own model"""
    stages = pair.prefill.described, pair.decode.described
    if pair.prefill.model == pair.decode.model and pair.prefill.revision != pair.decode.revision:
        return _error("the same revision on both workers")
    if None in (stages[0]["weights"], stages[1]["weights"]) or BY_KEY["weights"].fits(*stages):
        return None
    if "" in (stages[0]["layout"], stages[1]["layout"]):
        return _note(
            "the models have two names; give directories to check that they are one model in two precisions"
        )
    return _error("one model on both workers, or two precisions of it with one tokenizer")


_rule(
    "tokenizer", lambda stage: stage.given.get("tokenizer") or "model's", "both must count the same tokens"
)(_same(lambda stage: stage.given.get("tokenizer"), "tokenizer"))


@_rule("parallelism", lambda stage: str(stage.settings))
def _ranks(pair: Pair) -> Problem | None:
    """may differ: the transceiver reshapes KV"""
    prefill, decode = (stage.args for stage in pair.stages)
    if instead := unmet_by_prefill(pair.prefill.described).get("context_parallel_size"):
        return _error(f"prefill: {instead}")
    runtime = pair.decode.fingerprint.transceiver_runtime
    if decode.context_parallel_size != 1 and runtime != "CPP":
        instead = "transceiver_runtime: CPP on both workers: the Python one has no context parallelism"
        return _error(instead) if runtime == "PYTHON" else _note(instead)
    if prefill.pipeline_parallel_size != decode.pipeline_parallel_size and decode.pipeline_parallel_size > 1:
        return _note(
            "the transceiver regroups layers for decode's pipeline stages: test this pair with a long prompt"
        )
    return None


@_rule("GPUs", lambda stage: ",".join(stage.gpus) or "not given")
def _gpus(pair: Pair) -> Problem | None:
    """each worker uses the first GPUs that it sees"""
    if not all(stage.gpus for stage in pair.stages):
        return None
    few = [
        f"{stage.role}: {stage.settings.num_gpus} GPUs for {stage.settings}"
        for stage in pair.stages
        if len(stage.gpus) < stage.settings.num_gpus
    ]
    if few:
        return _error("; ".join(few))
    prefill, decode = (set(stage.gpus[: stage.settings.num_gpus]) for stage in pair.stages)
    shared = sorted(prefill & decode)
    memory = sum(stage.args.kv_cache_config.free_gpu_memory_fraction or 0 for stage in pair.stages)
    if not shared:
        return None
    if memory > 1:
        return _error(
            f"separate GPUs (both have {', '.join(shared)}), or free_gpu_memory_fraction below 0.5 on both"
        )
    return _note(
        f"both share GPU {', '.join(shared)}: each measures free memory when it loads, so the order of loading matters"
    )


def _graphs_of(stage: Stage) -> str:
    largest = stage.settings.largest_graph
    return "default" if largest is None else f"up to {largest}" if largest else "off"


@_rule("CUDA graphs", _graphs_of)
def _graphs(pair: Pair) -> Problem | None:
    """without CUDA graphs, kernel launches limit decode"""
    return _note_of_decode(graphs_misfit(pair.decode.settings))


def _note_of_decode(misfit: Misfit | None) -> Problem | None:
    return misfit and _note(f"decode: {misfit.cost}")


@_rule("guided decoding", lambda stage: stage.args.guided_decoding_backend or "off")
def _guides(pair: Pair) -> Problem | None:
    """both stages sample by the guide; a worker refuses guided requests if its engine has no backend"""
    prefill, decode = (stage.args.guided_decoding_backend for stage in pair.stages)
    if prefill != decode:
        return _error("the same guided_decoding_backend on both workers")
    if decode and pair.decode.args.scheduler_config.capacity_scheduler_policy == "MAX_UTILIZATION":
        return _note("decode: capacity_scheduler_policy: GUARANTEED_NO_EVICT, or a paused guide begins again")
    return None if decode else _note("both: guided_decoding_backend: xgrammar, for JSON and forced tools")


@_rule("parsers", lambda stage: f"{stage.config.tool_call_parser}, {stage.config.reasoning_parser}")
def _parsers(pair: Pair) -> Problem | None:
    """without parsers, answers contain the model's markup instead of tool_calls and reasoning_content"""
    lacking = {flag for stage in pair.stages for flag in lacking_parsers(stage.config, stage.model)}
    flags = ", ".join(sorted(lacking))
    return _note(f"both: {flags}, or in worker.env beside the files") if flags else None


@_rule("engine-stall-timeout", lambda stage: f"{_stall_of(stage):g} s")
def _stall(pair: Pair) -> Problem | None:
    """if no request gets a token for this long, the worker counts its engine as dead and exits"""
    early = _roles(pair, lambda stage: 0 < _stall_of(stage) < stall_seconds(stage.args.model_dump()))
    return _note(f"{early}: shorter than the longest step; leave the flag out") if early else None


def _stall_of(stage: Stage) -> float:
    given = stage.config.engine_stall_timeout
    return stall_seconds(stage.args.model_dump()) if given is None else given


@_rule("NIXL plugins", lambda stage: "")
def _plugins(pair: Pair) -> Problem | None:
    """NIXL loads its transports from this directory"""
    folder = pair.environ.get("NIXL_PLUGIN_DIR")
    if not folder or Path(folder).is_dir():
        return None
    return _error(f"NIXL_PLUGIN_DIR: {folder} does not exist; unset it or name an existing directory")
