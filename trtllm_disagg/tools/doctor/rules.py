"""The rules for a prefill and a decode worker on TensorRT-LLM: one function each, or one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from trtllm_disagg.engine.trtllm_version import (
    NEWEST_KNOWN,
    OLDEST_SERVED,
    PYTHON_TRANSCEIVER_BY_DEFAULT,
    TRANSFERS_END_BY_DEFAULT,
)
from trtllm_disagg.strategies import STRATEGIES
from trtllm_disagg.tools.doctor.pair import DEFAULT_BLOCK_SIZE, Pair, Side
from trtllm_disagg.worker.flips import Misfit, graphs_misfit, overlap_misfit, unmet_by_prefill
from trtllm_disagg.worker.pairing import BY_KEY, fixed_by

#: The verdict of a rule that holds, and of one about a deployment that could not be checked.
FINE, UNKNOWN = "ok", "not known"


class Severity(StrEnum):
    #: The pair would not start, would lose requests, or would answer wrongly.
    ERROR = "error"
    #: The pair works, with something worth knowing.
    NOTE = "note"


class Problem(NamedTuple):
    severity: Severity
    #: What to write instead, or to check.
    instead: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule says of a pair, or of a deployment."""

    rule: str
    #: ok, note, error or not known.
    verdict: str
    #: For the table, by column.
    values: Mapping[str, Any]
    why: str
    #: What to do; empty when it is ok.
    instead: str = ""


class Row(NamedTuple):
    """Makes the findings of one rule about what runs or is here, and not about a pair of files."""

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
    #: Why it matters.
    why: str
    #: The value of one side, for the table.
    value: Callable[[Side], Any]
    check: Check


#: In the order of the table.
RULES: list[Rule] = []


def _rule(name: str, value: Callable[[Side], Any], why: str = "") -> Callable[[Check], Check]:
    """Adds a check to RULES; its docstring says why it matters, unless `why` does."""

    def add(check: Check) -> Check:
        RULES.append(Rule(name, why or " ".join((check.__doc__ or "").split()), value, check))
        return check

    return add


def _error(instead: str) -> Problem:
    return Problem(Severity.ERROR, instead)


def _note(instead: str) -> Problem:
    return Problem(Severity.NOTE, instead)


@_rule("keys", lambda side: ", ".join(bad.key for bad in side.bad_keys) or "all known")
def _keys(pair: Pair) -> Problem | None:
    """TensorRT-LLM refuses keys that it does not know and values that it does not take, after minutes of loading"""
    found = [(side, bad) for side in pair.sides for bad in side.bad_keys]
    wrong = [
        f"{side.role}: {bad.key}: {bad.value!r}: expected {bad.instead}" for side, bad in found if bad.instead
    ]
    if wrong:
        return _error("; ".join(wrong))
    new = [f"{side.role}: {bad.key}" for side, bad in found]
    if new:
        return _note(f"{', '.join(new)} is no argument of TensorRT-LLM {NEWEST_KNOWN} that is known here")
    return None


@_rule("flags", lambda side: f"{len(side.overruled)} overruled" if side.overruled else "")
def _flags(pair: Pair) -> Problem | None:
    """a file beats the flags, as in the worker"""
    overruled = [f"{side.role}: {sentence}" for side in pair.sides for sentence in side.overruled]
    return _note("; ".join(overruled)) if overruled else None


#: Flags that both workers must have in common; their engine arguments have rules of their own.
_COMMON = ("strategy", "schedule_style", "handoff_protocol", "prefill_dispatch")


@_rule("strategy", lambda side: f"{side.config.strategy}, {side.config.schedule_style}")
def _settings(pair: Pair) -> Problem | None:
    """a worker calls the other one, and reads its answers, by these"""
    unequal = [
        BY_KEY[key].setting
        for key in _COMMON
        if getattr(pair.prefill.config, key) != getattr(pair.decode.config, key)
    ]
    return _error(f"the same {', '.join(unequal)} on both sides") if unequal else None


@_rule("TensorRT-LLM", lambda side: side.fingerprint.trtllm_version)
def _version(pair: Pair) -> Problem | None:
    """older versions number handoffs in another way, and every disaggregated request would fail"""
    version = pair.deployment.trtllm_version
    if version < OLDEST_SERVED:
        return _error(
            f"TensorRT-LLM {OLDEST_SERVED} or newer; {NEWEST_KNOWN} is what ai-dynamo 1.6.1 comes with"
        )
    if version > NEWEST_KNOWN:
        return _note(f"these rules know TensorRT-LLM up to {NEWEST_KNOWN}")
    return None


@_rule("transceiver", lambda side: side.fingerprint.transceiver or "off")
def _transceiver(pair: Pair) -> Problem | None:
    """without cache_transceiver_config.backend KV cannot leave an engine"""
    if without := _roles(pair, lambda side: side.fingerprint.transceiver is None):
        return _error(f"{without}: cache_transceiver_config: {{backend: NIXL}}")
    if silent := _roles(pair, lambda side: not side.gave("cache_transceiver_config", "backend")):
        return _note(f"{silent}: this worker sets backend DEFAULT; dynamo.trtllm would have no transceiver")
    return None


def _equal(key: str, instead: str) -> Check:
    def check(pair: Pair) -> Problem | None:
        fits = BY_KEY[key].fits(pair.prefill.described, pair.decode.described)
        return None if fits else _error(instead)

    return check


def _same(value: Callable[[Side], Any], what: str) -> Check:
    return lambda pair: (
        None if value(pair.prefill) == value(pair.decode) else _error(f"the same {what} on both sides")
    )


def _roles(pair: Pair, are: Callable[[Side], bool]) -> str:
    """The roles of the sides that `are`: "prefill and decode", or one of them, or empty."""
    return " and ".join(side.role.value for side in pair.sides if are(side))


def _of_transceivers(check: Check) -> Check:
    """`check`, for pairs with two transceivers. The row `transceiver` reports a missing one."""

    @wraps(check)
    def checked(pair: Pair) -> Problem | None:
        return None if any(side.fingerprint.transceiver is None for side in pair.sides) else check(pair)

    return checked


@_rule("backend", lambda side: side.fingerprint.transceiver)
@_of_transceivers
def _backend(pair: Pair) -> Problem | None:
    """each side speaks the protocol of its own backend only, and MPI needs both workers in one MPI job"""
    if problem := _equal("transceiver", "the same cache_transceiver_config.backend on both sides")(pair):
        return problem
    if pair.prefill.fingerprint.transceiver == "MPI":
        return _error("cache_transceiver_config.backend: NIXL or UCX on both sides")
    given = {
        side.args.cache_transceiver_config.backend
        for side in pair.sides
        if side.args.cache_transceiver_config
    }
    if "DEFAULT" in given and len(given) > 1:
        return _note("DEFAULT follows TRTLLM_USE_*_KVCACHE of each host; name the backend on both sides")
    return None


@_rule("transceiver_runtime", lambda side: side.fingerprint.transceiver_runtime)
@_of_transceivers
def _runtime(pair: Pair) -> Problem | None:
    """the C++ and the Python transceiver do not understand each other; only PYTHON can start with generation"""
    prefill, decode = (side.fingerprint.transceiver_runtime for side in pair.sides)
    if pair.deployment.schedule_style == "generation_first" and "CPP" in (prefill, decode):
        return _error("cache_transceiver_config.transceiver_runtime: PYTHON on both sides, with backend NIXL")
    if problem := _equal("transceiver_runtime", "the same transceiver_runtime on both sides")(pair):
        return problem
    if prefill != decode:
        return _note(
            "auto is decided by each worker for itself; name the same transceiver_runtime on both sides"
        )
    return None


def _buffer_of(side: Side) -> int | None:
    transceiver = side.args.cache_transceiver_config
    return transceiver.max_tokens_in_buffer if transceiver else None


_BUFFER_KEY = "cache_transceiver_config.max_tokens_in_buffer"
#: The C++ transceiver makes a buffer for KV that has no room in its own, which only these two can send from
#: (batch_manager/baseTransBuffer.cpp; executor/cache_transmission/agent_utils/connection.cpp).
_TAKES_ANY_MEMORY = ("UCX", "MPI")


def _is_cpp(side: Side, pair: Pair) -> bool:
    """For certain: where `auto` is no default of an older version."""
    has_python = pair.deployment.trtllm_version >= PYTHON_TRANSCEIVER_BY_DEFAULT
    return side.fingerprint.transceiver_runtime != "PYTHON" and not (has_python and _is_auto(side))


def _is_auto(side: Side) -> bool:
    return side.fingerprint.transceiver_runtime == "auto"


def _is_too_small(side: Side, longest: int | None) -> bool:
    """Whether the buffer has less room than the longest prompt. For the Python transceiver, 0 means no limit."""
    buffer = _buffer_of(side)
    if buffer is None:
        return False
    if buffer == 0:
        return side.fingerprint.transceiver_runtime != "PYTHON"
    return longest is not None and buffer < longest


@_rule("max_tokens_in_buffer", _buffer_of)
@_of_transceivers
def _buffer(pair: Pair) -> Problem | None:
    """the C++ transceiver moves KV through a buffer of this size, and longer prompts fail on NIXL; the Python one
    moves no more than this at once
    """

    def fails(side: Side) -> bool:
        return is_small(side) and side.fingerprint.transceiver not in _TAKES_ANY_MEMORY

    def is_small(side: Side) -> bool:
        return _is_too_small(side, pair.longest_prompt)

    def is_broken(side: Side) -> bool:
        return _is_cpp(side, pair) and bool((_buffer_of(side) or 0) % side.fingerprint.block_size)

    if broken := _roles(pair, is_broken):
        return _error(f"{broken}: {_BUFFER_KEY}: a multiple of tokens_per_block, or no engine starts")
    enough = f"{_BUFFER_KEY}: {pair.longest_prompt or 'at least the longest prompt'}"
    if losing := _roles(pair, lambda side: fails(side) and _is_cpp(side, pair)):
        return _error(f"{losing}: {enough}")
    if unsure := _roles(pair, lambda side: fails(side) and _is_auto(side)):
        return _note(
            f"{unsure}: {enough}, or transceiver_runtime: PYTHON: where auto takes the C++ one, longer prompts fail"
        )
    if small := _roles(pair, is_small):
        return _note(f"{small}: {enough}: longer prompts come through, with less beside them or slower")
    if any(_buffer_of(side) is None for side in pair.sides):
        return _note(
            "give both sides max_tokens_in_buffer of at least the longest prompt, as TensorRT-LLM's guide says; the "
            "C++ transceiver has room for 512 MB otherwise (TRTLLM_KVCACHE_TRANSFER_BUFFER_SIZE)"
        )
    return None


def _timeout_of(side: Side) -> str:
    transceiver = side.args.cache_transceiver_config
    if transceiver is not None and side.gave("cache_transceiver_config", "kv_transfer_timeout_ms"):
        return str(transceiver.kv_transfer_timeout_ms)
    return "unset"


@_rule("kv_transfer_timeout_ms", _timeout_of)
@_of_transceivers
def _timeout(pair: Pair) -> Problem | None:
    """KV that no decode worker fetches is held until then: without an end, for ever"""
    is_endless = {"None"} if pair.deployment.trtllm_version >= TRANSFERS_END_BY_DEFAULT else {"None", "unset"}
    if endless := _roles(pair, lambda side: _timeout_of(side) in is_endless):
        return _error(f"{endless}: cache_transceiver_config.kv_transfer_timeout_ms: 60000")
    if _timeout_of(pair.prefill) != _timeout_of(pair.decode):
        return _note(
            "the same kv_transfer_timeout_ms on both sides, or one of them gives up while the other waits"
        )
    return None


@_rule("overlap scheduler", lambda side: "off" if side.args.disable_overlap_scheduler else "on")
def _overlap(pair: Pair) -> Problem | None:
    """context_only requests and overlapping steps exclude each other in older TensorRT-LLM"""
    if instead := unmet_by_prefill(pair.prefill.described).get("overlap_scheduler"):
        return _error(f"prefill: {instead}")
    if problem := _note_of_decode(overlap_misfit(pair.decode.settings)):
        return problem
    if pair.prefill.args.disable_overlap_scheduler:
        return None
    return _note("fine since TensorRT-LLM PR 10755; older versions refuse context_only requests with it")


def _window_of(side: Side) -> str:
    window = side.args.kv_cache_config.max_attention_window
    return "model's" if window is None else str(window)


_rule(
    "KV dtype",
    lambda side: side.fingerprint.kv_dtype,
    "KV moves as it is stored: another dtype reads other numbers",
)(
    _equal(
        "kv_dtype",
        "the same kv_cache_config.dtype on both sides (`auto` is the model's: give --model to resolve it)",
    )
)

_rule("dtype", lambda side: side.fingerprint.dtype, "the model's own KV dtype follows from it")(
    _equal("dtype", "the same dtype on both sides")
)

_rule("attention window", _window_of, "KV pools are laid out by it, layer by layer")(
    _same(_window_of, "kv_cache_config.max_attention_window")
)


@_rule("tokens_per_block", lambda side: side.fingerprint.block_size)
def _block_size(pair: Pair) -> Problem | None:
    """blocks are what moves, what is reused and what the router counts in"""
    prefill, decode = (side.fingerprint.block_size for side in pair.sides)
    if prefill != decode:
        return _error(f"kv_cache_config.tokens_per_block: {prefill} on both sides")
    wanted = pair.deployment.kv_block_size
    if wanted is not None and wanted != prefill:
        return _error(
            f"--kv-block-size {prefill}, for the router too; or tokens_per_block: {wanted} on both sides"
        )
    if wanted is None and prefill != DEFAULT_BLOCK_SIZE:
        return _note(f"the router has to count in blocks of {prefill} too: there, --kv-block-size {prefill}")
    return None


@_rule("KV events", lambda side: "reuse on" if side.args.kv_cache_config.enable_block_reuse else "reuse off")
def _reuse(pair: Pair) -> Problem | None:
    """the worker that the frontend routes to tells which blocks it has"""

    def streams(side: Side) -> bool:
        events = side.args.kv_cache_config.kv_events_config
        return events is not None and bool(events.enable_kv_cache_events)

    routed = STRATEGIES[pair.deployment.strategy].kv_routed_roles
    if streaming := _roles(pair, streams):
        return _error(f"{streaming}: no kv_events_config: this worker polls its events (--publish-kv-events)")
    if blind := _roles(
        pair, lambda side: side.role.value in routed and not side.args.kv_cache_config.enable_block_reuse
    ):
        return _note(f"{blind}: enable_block_reuse: true, or KV routing has nothing to find")
    return None


@_rule("max_beam_width", lambda side: side.args.max_beam_width)
def _beams(pair: Pair) -> Problem | None:
    """a handoff carries the KV of one beam"""
    wide = _roles(pair, lambda side: side.args.max_beam_width != 1)
    return _error(f"{wide}: max_beam_width: 1") if wide else None


_rule(
    "speculative decoding",
    lambda side: side.fingerprint.speculative or "off",
    "draft layers have KV of their own, and a handoff carries the first draft tokens",
)(
    _equal(
        "speculative",
        "the same speculative_config on both sides, or on the Python transceiver at decode only",
    )
)


@_rule(
    "max_num_tokens",
    lambda side: f"{side.args.max_num_tokens}{', chunked' if side.args.enable_chunked_prefill else ''}",
)
def _steps(pair: Pair) -> Problem | None:
    """a prompt that fits no step is refused unless it may be cut"""
    args, longest = pair.prefill.args, pair.longest_prompt
    if args.enable_chunked_prefill or (longest is not None and longest <= args.max_num_tokens):
        return None
    if longest is None:
        return _note(
            "prefill: max_seq_len is the model's; enable_chunked_prefill: true, or max_num_tokens of the longest prompt"
        )
    return _error(f"prefill: enable_chunked_prefill: true, or max_num_tokens: {longest}")


@_rule("max_seq_len", lambda side: side.max_seq_len or "model's")
def _lengths(pair: Pair) -> Problem | None:
    """a prompt that prefill takes must fit where it is decoded"""
    prefill, decode = (side.longest for side in pair.sides)
    if prefill is not None and decode is not None and prefill > decode:
        return _error(f"decode: max_seq_len: {prefill}")
    if beyond := _roles(pair, lambda side: side.max_seq_len != side.longest):
        longest = next(side.longest for side in pair.sides if side.max_seq_len != side.longest)
        return _note(f"{beyond}: max_seq_len: {longest}, the model's own, which TensorRT-LLM takes instead")
    return None


@_rule("switch", lambda side: ", ".join(fixed_by(side.config)))
def _switch(pair: Pair) -> Problem | None:
    """after a switch the other worker is the first stage, and a frontend keeps one context length for a model"""
    if flags := ", ".join(flag for side in pair.sides for flag in fixed_by(side.config)):
        return _note(
            f"this pair cannot be switched: only workers at the usual endpoints can, without {flags}"
        )
    prefill, decode = (side.longest for side in pair.sides)
    if prefill is None or decode is None or prefill >= decode:  # a longer prefill is an error
        return None
    return _note(
        f"this pair cannot be switched: the same max_seq_len on both sides; prompts above {prefill} tokens do not fit "
        "the prefill worker, though decode has room"
    )


@_rule("model", lambda side: side.model or "not given")
def _model(pair: Pair) -> Problem | None:
    """KV of one model means nothing to another"""
    sides = pair.prefill.described, pair.decode.described
    if pair.prefill.model == pair.decode.model and pair.prefill.revision != pair.decode.revision:
        return _error("the same revision on both sides")
    if None in (sides[0]["weights"], sides[1]["weights"]) or BY_KEY["weights"].fits(*sides):
        return None
    if "" in (sides[0]["layout"], sides[1]["layout"]):
        return _note(
            "two names: only one model in two precisions makes a pair; give directories to compare them"
        )
    return _error("one model on both sides, or two precisions of it with one tokenizer")


_rule("tokenizer", lambda side: side.given.get("tokenizer") or "model's", "both count the same tokens")(
    _same(lambda side: side.given.get("tokenizer"), "tokenizer")
)


@_rule("parallelism", lambda side: str(side.settings))
def _ranks(pair: Pair) -> Problem | None:
    """it may differ; KV is cut anew on the way"""
    prefill, decode = (side.args for side in pair.sides)
    if instead := unmet_by_prefill(pair.prefill.described).get("context_parallel_size"):
        return _error(f"prefill: {instead}")
    runtime = pair.decode.fingerprint.transceiver_runtime
    if decode.context_parallel_size != 1 and runtime != "CPP":
        instead = "transceiver_runtime: CPP on both sides: the Python one takes no context parallelism"
        return _error(instead) if runtime == "PYTHON" else _note(instead)
    if prefill.pipeline_parallel_size != decode.pipeline_parallel_size and decode.pipeline_parallel_size > 1:
        return _note(
            "layers are regrouped on the way to a decode worker with pipeline stages: try this pair with a long prompt"
        )
    return None


@_rule("GPUs", lambda side: ",".join(side.gpus) or "not given")
def _gpus(pair: Pair) -> Problem | None:
    """every worker takes the first GPUs that it sees"""
    if not all(side.gpus for side in pair.sides):
        return None
    few = [
        f"{side.role}: {side.num_gpus} GPUs for {side.settings}"
        for side in pair.sides
        if len(side.gpus) < side.num_gpus
    ]
    if few:
        return _error("; ".join(few))
    prefill, decode = (set(side.gpus[: side.num_gpus]) for side in pair.sides)
    shared = sorted(prefill & decode)
    memory = sum(side.args.kv_cache_config.free_gpu_memory_fraction or 0 for side in pair.sides)
    if not shared:
        return None
    if memory > 1:
        return _error(
            f"GPUs of their own: both have {', '.join(shared)}; or free_gpu_memory_fraction below 0.5 on both"
        )
    return _note(
        f"both share GPU {', '.join(shared)}: each sees as free what the other has left when it loads"
    )


def _graphs_of(side: Side) -> str:
    most = side.settings.largest_graph
    return "default" if most is None else f"up to {most}" if most else "off"


@_rule("CUDA graphs", _graphs_of)
def _graphs(pair: Pair) -> Problem | None:
    """decode is bound by launches without them"""
    return _note_of_decode(graphs_misfit(pair.decode.settings))


def _note_of_decode(misfit: Misfit | None) -> Problem | None:
    return misfit and _note(f"decode: {misfit.cost}")


_rule(
    "guided decoding",
    lambda side: side.args.guided_decoding_backend or "off",
    "prefill samples the first token of a guided answer",
)(_same(lambda side: side.args.guided_decoding_backend, "guided_decoding_backend"))


@_rule("NIXL plugins", lambda side: "")
def _plugins(pair: Pair) -> Problem | None:
    """NIXL loads its transports from there, and finds none in a directory that is not there"""
    folder = pair.deployment.environ.get("NIXL_PLUGIN_DIR")
    if not folder or Path(folder).is_dir():
        return None
    return _error(f"NIXL_PLUGIN_DIR: a directory that exists, or unset; not {folder}")
