"""Judges whether a worker may serve in the other role, and what its engine's settings cost there: an engine runs both
phases, but its arguments suit one. `flip` and `doctor` share these functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from packaging.version import Version

from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine_facts import Described, EngineFacts
from trtllm_disagg.engine.trtllm_version import OLDEST_SERVED
from trtllm_disagg.errors import ConfigError, InvalidRequestError
from trtllm_disagg.worker.pairing import Description, fixed_by, require_pair

#: Below this share of the role's largest worker, a worker does much less than the others.
_MUCH_SMALLER = 0.5
#: TensorRT-LLM may omit weights that the role in this variable does not need. Besides `context` and `generation` it
#: accepts older names: ctx0, gen0, decode.
_ROLE_VARIABLE = "TRTLLM_DISAGG_ROLE"
_NAMES_OF_ROLES = {"ctx": Role.PREFILL, "context": Role.PREFILL, "prefill": Role.PREFILL}
_NAMES_OF_ROLES |= {"gen": Role.DECODE, "generation": Role.DECODE, "decode": Role.DECODE}
#: With 1 it decodes without waiting for KV.
_DECODES_WITHOUT_KV = "TRTLLM_DISAGG_BENCHMARK_GEN_ONLY"


class RoleSettings(Described, frozen=True):
    """The settings that suit an engine to one role. None: unknown, or the engine's choice."""

    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    #: Requests in the largest CUDA graph; 0 without graphs.
    largest_graph: int | None = None
    overlap_scheduler: bool | None = None
    block_reuse: bool | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    #: Variables, with their values, that tie the engine to a role -> that role.
    role_variables: dict[str, Role] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, args: Mapping[str, Any], environ: Mapping[str, str]) -> RoleSettings:
        """`args`: the arguments of LLM(...); missing ones have TensorRT-LLM's defaults."""
        return cls(
            args.get("max_batch_size"),
            args.get("max_num_tokens"),
            _largest_graph(args.get("cuda_graph_config", {})),
            not args.get("disable_overlap_scheduler"),
            (args.get("kv_cache_config") or {}).get("enable_block_reuse", True),
            args.get("tensor_parallel_size") or 1,
            args.get("pipeline_parallel_size") or 1,
            args.get("context_parallel_size") or 1,
            args.get("moe_expert_parallel_size"),
            bool(args.get("enable_attention_dp")),
            _role_variables(environ),
        )

    @property
    def num_gpus(self) -> int:
        sizes = self.pipeline_parallel_size * self.context_parallel_size
        return (self.tensor_parallel_size or 1) * sizes

    def __str__(self) -> str:
        """The engine's parallelism; empty if unknown."""
        if self.tensor_parallel_size is None:
            return ""
        expert = f" EP{self.moe_expert_parallel_size}" if (self.moe_expert_parallel_size or 0) > 1 else ""
        dp = " attention DP" if self.enable_attention_dp else ""
        context = f" CP{self.context_parallel_size}" if self.context_parallel_size != 1 else ""
        return f"TP{self.tensor_parallel_size} PP{self.pipeline_parallel_size}{context}{expert}{dp}"


def _largest_graph(graphs: Mapping[str, Any] | None) -> int | None:
    if graphs is None:
        return 0
    return max(graphs.get("batch_sizes") or [graphs.get("max_batch_size") or 0]) or None


def _role_variables(environ: Mapping[str, str]) -> dict[str, Role]:
    named = environ.get(_ROLE_VARIABLE, "").strip()
    role = _NAMES_OF_ROLES.get(named.lower().rstrip("0123456789"))
    bound = {} if role is None else {f"{_ROLE_VARIABLE}: {named}": role}
    if environ.get(_DECODES_WITHOUT_KV) == "1":
        bound[f"{_DECODES_WITHOUT_KV}: 1"] = Role.DECODE
    return bound


# -- what a role needs, and what it is slow with


def unmet_by_prefill(prefill: Description) -> dict[str, str]:
    """TensorRT-LLM's unmet needs for a prefill worker's engine, by setting."""
    settings, version, unmet = RoleSettings.described(prefill), prefill.get("trtllm_version"), {}
    if settings.overlap_scheduler and version and Version(version) < OLDEST_SERVED:
        unmet["overlap_scheduler"] = "disable_overlap_scheduler: true"
    if settings.context_parallel_size != 1:
        only_decode = "context_parallel_size: 1; only decode workers take more (cp_type: HELIX)"
        unmet["context_parallel_size"] = only_decode
    return unmet


class Misfit(NamedTuple):
    """A setting with which a worker serves a role slowly."""

    #: The key and the value.
    setting: str
    allowed: str
    #: What it costs.
    cost: str
    #: A flip needs --force.
    is_grave: bool = True

    def __str__(self) -> str:
        return f"{self.setting} (expected {self.allowed}): {self.cost}"


def graphs_misfit(decode: RoleSettings) -> Misfit | None:
    """The misfit of a decode worker's CUDA graphs."""
    largest, batch = decode.largest_graph, decode.max_batch_size
    if largest == 0:
        cost = "without CUDA graphs every step pays for its launches"
        return Misfit("cuda_graph_config: null", "graphs", cost)
    if largest is not None and batch is not None and largest < batch:
        cost = f"steps of more than {largest} requests run without a graph; max_batch_size is {batch}"
        return Misfit(f"cuda_graph_config.max_batch_size: {largest}", str(batch), cost, is_grave=False)
    return None


def overlap_misfit(decode: RoleSettings) -> Misfit | None:
    """The misfit of a decode worker's scheduler."""
    if decode.overlap_scheduler is not False:
        return None
    cost = "in every step the GPU waits for the CPU work of the step before"
    return Misfit("disable_overlap_scheduler: true", "false", cost)


def _misfits(own: Description, alike: Sequence[Description]) -> Iterator[Misfit]:
    """A worker's misfits in its new role, alone and compared with the role's other workers, `alike`."""
    to, settings = Role(own["role"]), RoleSettings.described(own)
    beside = [RoleSettings.described(each) for each in alike]
    for variable, role in settings.role_variables.items():
        if role is not to:
            yield Misfit(variable, "it unset", f"TensorRT-LLM may have built this engine for {role} alone")
    if to is Role.DECODE:
        yield from filter(None, (graphs_misfit(settings), overlap_misfit(settings)))
    if settings.block_reuse is False and any(each.block_reuse for each in beside):
        cost = f"the other {to} workers reuse blocks, this one computes or fetches each prefix anew"
        yield Misfit("kv_cache_config.enable_block_reuse: false", "true", cost)
    facts, others = EngineFacts.described(own), [EngineFacts.described(each) for each in alike]
    key = "max_batch_size" if {each.num_ranks for each in (facts, *others)} == {1} else "slots of all ranks"
    yield from _smaller(key, facts.slots, [each.slots for each in others], to, is_grave=to is Role.DECODE)
    tokens = [each.max_num_tokens for each in beside]
    yield from _smaller("max_num_tokens", settings.max_num_tokens, tokens, to, is_grave=False)
    sizes = {str(each) for each in beside} - {""}
    if sizes and str(settings) not in sizes:
        cost = f"its steps take another time than those of other {to} workers, and KV is cut anew on its way"
        yield Misfit(str(settings), " or ".join(sorted(sizes)), cost, is_grave=False)
    if settings.num_gpus > 1 and own.get("transceiver_runtime") in ("PYTHON", "auto"):
        cost = "the Python transceiver keeps the marks of both roles: until a restart ranks agree twice in each step"
        yield Misfit(str(settings), "one GPU, or transceiver_runtime: CPP", cost, is_grave=False)


def _smaller(
    key: str, own: int | None, others: Sequence[int | None], to: Role, *, is_grave: bool
) -> Iterator[Misfit]:
    largest = max(filter(None, others), default=0)
    if own is not None and own < (least := math.ceil(_MUCH_SMALLER * largest)):
        cost = f"another {to} worker has {largest}, and this one does less at once"
        yield Misfit(f"{key}: {own}", f"at least {least}", cost, is_grave)


# -- the check


def flipped(config: WorkerConfig, to: Role) -> WorkerConfig:
    """The worker's configuration in another role. Raises InvalidRequestError for what ties it to its own."""
    if config.role is Role.AGG:
        raise _refusal(to, "no flip: a worker of mode agg runs both phases")
    if config.role is to:
        raise _refusal(to, f"the other role: this worker is a {to} worker")
    if flags := " and ".join(fixed_by(config)):
        raise _refusal(to, f"a worker at the usual endpoints; this one was started with {flags}")
    try:
        return replace(config, role=to, endpoint=None, next_endpoint=None)
    except ConfigError as error:
        raise _refusal(to, f"settings that a {to} worker may have: {error}") from None


def check_flip(own: Description, others: Sequence[Description], *, force: bool) -> list[str]:
    """Check that a worker can join its new role; `own`: its description in that role, `others`: all other workers of
    its model. Returns a sentence per slow setting. Raises InvalidRequestError or ConfigError for what would fail, or
    without `force` be very slow.
    """
    to = Role(own["role"])
    before = Role.DECODE if to is Role.PREFILL else Role.PREFILL
    alike, peers = ([each for each in others if each.get("role") == role] for role in (to, before))
    if not peers and not force:
        raise _refusal(to, f"another {before} worker beside it: it is the last {before} worker (--force)")
    for each in peers:
        require_pair(own, each)
    if to is Role.PREFILL and (unmet := unmet_by_prefill(own)):
        raise _refusal(to, "; ".join(unmet.values()))
    for each in alike:
        if each.get("weights") != own.get("weights"):
            raise _refusal(to, f"the model of the other {to} workers, {each.get('source')}")
        if why := EngineFacts.described(own).why_less_than(EngineFacts.described(each), to is Role.PREFILL):
            raise _refusal(to, f"what the other {to} workers take: {why}")
    misfits = list(_misfits(own, alike))
    if not force and (grave := [str(each) for each in misfits if each.is_grave]):
        raise InvalidRequestError(
            f"to: {to.value!r} is not allowed with {'; '.join(grave)} (--force flips it all the same)"
        )
    return [str(each) for each in misfits]


def _refusal(to: Role, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"to: {to.value!r} is not allowed; expected {allowed}")
