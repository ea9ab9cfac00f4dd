"""Says what two workers of one deployment must have in common. Starting workers and `doctor` compare it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

from trtllm_disagg import __version__
from trtllm_disagg.config.worker_config import Role, WorkerConfig, flag_of
from trtllm_disagg.engine.table import ENGINES, UNRESOLVED
from trtllm_disagg.engine.trtllm_version import default_runtime
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.worker.model_facts import UNKNOWN_MODEL, ModelFacts

#: A worker's JSON answer to a `Describe`. Another version of this package may lack keys.
Description = Mapping[str, Any]

_AUTO = "auto"
#: The first of these variables that is 1 defines TensorRT-LLM's DEFAULT; otherwise DEFAULT is NIXL.
_DEFAULT_BACKEND = {
    "TRTLLM_USE_NIXL_KVCACHE": "NIXL",
    "TRTLLM_USE_UCX_KVCACHE": "UCX",
    "TRTLLM_USE_MOONCAKE_KVCACHE": "MOONCAKE",
    "TRTLLM_USE_MPI_KVCACHE": "MPI",
}
#: Settings of speculative decoding that decide the KV's shape and a handoff's number of draft tokens.
_SPECULATIVE = ("decoding_type", "max_draft_len", "num_nextn_predict_layers", "speculative_model_dir")
#: A description's key: true once the worker has run another strategy than at its start.
WAS_SWITCHED = "was_switched"
#: Old name of a setting -> the new one.
_RENAMED = {"speculative_model": "speculative_model_dir"}


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    #: The clients' name.
    model: str
    #: The path or hub name in `--model`.
    source: str
    #: Hash of config.json and weights, or the name of a model that the engine downloads.
    weights: str
    #: `ModelFacts.layout` and `precision` if the engine can read KV of another weight precision; else empty.
    layout: str = ""
    precision: str = ""
    role: str = Role.AGG.value
    #: Peers call this worker; frontends only while it is a first stage.
    is_run_by_workers: bool = False


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """An engine's settings that decide whether another engine can read its KV."""

    engine: str
    #: None for other engines, or if TensorRT-LLM's version is unknown.
    trtllm_version: str | None
    block_size: int
    dtype: str
    kv_dtype: str
    transceiver: str | None
    #: PYTHON or CPP; auto if only the engine knows.
    transceiver_runtime: str | None
    speculative: str | None
    max_seq_len: int | None

    @classmethod
    def of(
        cls,
        engine: str,
        args: Mapping[str, Any],
        block_size: int,
        model: ModelFacts = UNKNOWN_MODEL,
        trtllm_version: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Fingerprint:
        """`args`: the arguments of LLM(...). Resolves `auto` and DEFAULT if their meaning is known."""
        transceiver = args.get("cache_transceiver_config") or {}
        is_trtllm = ENGINES.get(engine, UNRESOLVED).is_tensorrt_llm
        dtype = _unless_auto(args.get("dtype"), model.dtype)
        given_kv_dtype = (args.get("kv_cache_config") or {}).get("dtype")
        model_kv_dtype = model.kv_dtype if model.kv_dtype != model.dtype else dtype
        return cls(
            engine=engine,
            trtllm_version=trtllm_version if is_trtllm else None,
            block_size=block_size,
            dtype=dtype,
            kv_dtype=_unless_auto(given_kv_dtype, model_kv_dtype),
            transceiver=_backend(transceiver, environ or {}, is_trtllm),
            transceiver_runtime=_runtime(transceiver, trtllm_version) if is_trtllm else None,
            speculative=_speculative(args.get("speculative_config")),
            max_seq_len=args.get("max_seq_len") or model.max_positions,
        )


def _unless_auto(given: Any, otherwise: str) -> str:
    name = str(given or _AUTO).lower()
    return otherwise if name == _AUTO else name


def _backend(transceiver: Mapping[str, Any], environ: Mapping[str, str], is_trtllm: bool) -> str | None:
    backend: str | None = transceiver.get("backend")
    if backend != "DEFAULT" or not is_trtllm:
        return backend
    return next((name for variable, name in _DEFAULT_BACKEND.items() if environ.get(variable) == "1"), "NIXL")


def _runtime(transceiver: Mapping[str, Any], version: str | None) -> str:
    given = transceiver.get("transceiver_runtime", default_runtime(version))
    if given is None:
        return "CPP"
    has_timeout = transceiver.get("kv_transfer_timeout_ms", 0) is not None
    may_be_python = has_timeout and transceiver.get("backend") in ("DEFAULT", "NIXL", None)
    return "CPP" if given == _AUTO and not may_be_python else str(given)


def _speculative(config: Mapping[str, Any] | None) -> str | None:
    if not config:
        return None
    current = {_RENAMED.get(key, key): value for key, value in config.items()}
    settings = [f"{key}={current[key]}" for key in _SPECULATIVE if key in current]
    return " ".join(settings) or "on"


# -- the properties


class Property(NamedTuple):
    """A key of both descriptions. `fits(prefill, decode)`: the two workers can serve together."""

    key: str
    #: The setting that decides its value, for errors.
    setting: str
    fits: Callable[[Description, Description], bool]
    #: A command can change it while workers serve.
    may_change: bool = False
    #: All workers of a prefill queue share the value.
    is_in_group: bool = True


def _equal(
    key: str,
    setting: str,
    *,
    may_change: bool = False,
    is_in_group: bool = True,
    unknown: Collection[Any] = (),
) -> Property:
    """`unknown`: values that fit any other value."""

    def fits(one: Description, other: Description) -> bool:
        values = {one.get(key), other.get(key)}
        return len(values) == 1 or not values.isdisjoint(unknown)

    return Property(key, setting, fits, may_change, is_in_group)


def may_share_kv(one: Description, other: Description) -> bool:
    """Whether both have the same checkpoint, or one model in two weight precisions with one KV dtype."""
    if one.get("weights") == other.get("weights"):
        return True
    has_one_layout = bool(one.get("layout")) and one.get("layout") == other.get("layout")
    is_one_model = has_one_layout and one.get("precision") != other.get("precision")
    is_queued = any(str(each.get("prefill_dispatch")).startswith("queue") for each in (one, other))
    return is_one_model and _have_both_roles(one, other) and not is_queued


def _drafts_fit(prefill: Description, decode: Description) -> bool:
    """Decode alone may draft: TensorRT-LLM pads the handoff of a prefill that does not. Only the Python transceiver
    omits the draft layers' KV (`test_gen_only_spec_dec` of accuracy/test_disaggregated_serving.py).
    """
    drafts, wanted = prefill.get("speculative"), decode.get("speculative")
    if drafts == wanted:
        return True
    is_of_text = str(wanted).lower().startswith("decoding_type=ngram")
    runtimes = {each.get("transceiver_runtime") for each in (prefill, decode)}
    return drafts is None and (is_of_text or "CPP" not in runtimes)


def _lengths_fit(prefill: Description, decode: Description) -> bool:
    """The decode worker must accept every sequence length that the prefill worker accepts."""
    longest, room = prefill.get("max_seq_len"), decode.get("max_seq_len")
    return longest is None or room is None or longest <= room


def _images_fit(prefill: Description, decode: Description) -> bool:
    """Only with the flag has decode checked that its engine cannot mix up images (`config/image_checks.py`)."""
    return not prefill.get("images") or bool(decode.get("images"))


PROPERTIES = (
    _equal("strategy", "--disaggregation-strategy", may_change=True),
    _equal("schedule_style", "--schedule-style"),
    _equal("handoff_protocol", "--handoff-protocol"),
    _equal("prefill_dispatch", "--prefill-dispatch"),
    _equal("engine", "--engine"),
    # One version writes the handoff, the other reads it, and most versions changed its fields.
    _equal("trtllm_version", "version of TensorRT-LLM", unknown=(None,)),
    _equal("block_size", "kv_cache_config.tokens_per_block (--kv-block-size)"),
    _equal("kv_dtype", "kv_cache_config.dtype"),
    _equal("dtype", "dtype"),
    _equal("transceiver", "cache_transceiver_config.backend"),
    # DEFAULT depends on the machine. Unknown before the engine is loaded.
    _equal(
        "kv_transport",
        "how KV moves under cache_transceiver_config.backend (name it on both instead of DEFAULT)",
        is_in_group=False,
        unknown=(None,),
    ),
    _equal(
        "transceiver_runtime",
        "cache_transceiver_config.transceiver_runtime",
        is_in_group=False,
        unknown=(_AUTO, None),
    ),
    Property("speculative", "speculative_config", _drafts_fit, is_in_group=False),
    Property("max_seq_len", "max_seq_len", _lengths_fit, is_in_group=False),
    Property("images", "--enable-multimodal", _images_fit, is_in_group=False),
    _equal("model", "--served-model-name"),
    # Unknown to version 0.2. A queue has one endpoint, and its namespace includes the revision.
    _equal("revision", "--worker-revision", is_in_group=False),
    Property("weights", "--model (hash of config.json and weights)", may_share_kv),
)
BY_KEY = {each.key: each for each in PROPERTIES}


# -- live workers


def describe_worker(
    config: WorkerConfig, fingerprint: Fingerprint, identity: ModelIdentity
) -> dict[str, Any]:
    """This worker's description as JSON, without what only the running engine knows."""
    return {
        **asdict(identity),
        **asdict(fingerprint),
        "role": config.role.value,
        "strategy": config.strategy,
        "schedule_style": config.schedule_style.value,
        "handoff_protocol": config.handoff_protocol,
        # 0.2 calls its own queue "queue": a pair that would share no queue is refused.
        "prefill_dispatch": config.prefill_dispatch.replace("queue", "queue of tickets"),
        "revision": config.worker_revision,
        "images": config.images is not None,
        "kv_transport": None,
        "ctx_info_endpoint": None,
        "ctx_dp_rank": None,
        "versions": {"trtllm_disagg": __version__, "ai_dynamo": _dynamo_version()},
    }


def _dynamo_version() -> str | None:
    try:
        return metadata.version("ai-dynamo")
    except metadata.PackageNotFoundError:
        return None


def fixed_by(config: WorkerConfig) -> list[str]:
    """The flags that give this worker an unusual endpoint, which prevents switch and flip."""
    usual = replace(config, endpoint=None, next_endpoint=None)
    places = {"endpoint": "endpoint_id", "next_endpoint": "next_endpoint_id"}
    moved = [name for name, place in places.items() if getattr(config, place) != getattr(usual, place)]
    return [f"{flag_of(name)} {config.value_of(name)}" for name in moved]


def group_of(own: Description) -> str:
    """16 hexadecimal digits, equal for all workers that could serve one request together."""
    same = [own[each.key] for each in PROPERTIES if each.is_in_group and not each.may_change]
    return hashlib.blake2b(json.dumps(same).encode(), digest_size=8).hexdigest()


def require_pair(own: Description, other: Description, ignored: Collection[str] = ()) -> None:
    """Raises ConfigError with one line per difference. Properties in `ignored` may differ."""
    role, other_role = own.get("role"), other.get("role")
    prefill, decode = (other, own) if role == Role.DECODE else (own, other)
    differences = [
        f"{each.setting}: {role} {own.get(each.key)!r}, {other_role} {other.get(each.key)!r}"
        for each in PROPERTIES
        if each.key not in ignored and not _fits(each, prefill, decode)
    ]
    if not _have_both_roles(own, other):
        they = "both workers are" if role == other_role else f"no stage of {other_role} is called by"
        differences.insert(0, f"--disaggregation-mode: {they} {role}")
    if differences:
        raise ConfigError("the two stages do not fit together; " + "; ".join(differences))


def _fits(each: Property, prefill: Description, decode: Description) -> bool:
    try:
        return each.fits(prefill, decode)
    except TypeError:  # a value's type differs: another version of this package, or another program
        return False


def require_fit(own: Description, others: Iterable[Description]) -> None:
    """`require_pair` with all of `others` that have the other role, the same model and the same strategy."""
    for other in others:
        is_same_deployment = all(other.get(key) == own[key] for key in ("model", "strategy"))
        if _have_both_roles(own, other) and is_same_deployment:
            require_pair(own, other)


def _have_both_roles(own: Description, other: Description) -> bool:
    return [own.get("role"), other.get("role")] in ([Role.PREFILL, Role.DECODE], [Role.DECODE, Role.PREFILL])


def were_switched(others: Iterable[Description]) -> bool:
    """Whether any has run another strategy than at its start."""
    return any(other.get(WAS_SWITCHED) for other in others)


def strategy_among(own: Description, peers: Sequence[Description]) -> str:
    """A starting worker's strategy: its own, or the one that all `peers` were switched to."""
    running = {str(peer.get("strategy")) for peer in peers}
    return running.pop() if len(running) == 1 and were_switched(peers) else str(own["strategy"])


#: For calls between serving workers: during a switch their strategies may differ.
require_callable = partial(require_pair, ignored=("strategy",))
