"""Builds the keyword arguments of LLM(...) from flags, YAML file and JSON override.

They are plain values for any engine, checked, where known, before an engine exists. Precedence as in Dynamo's worker:
--override-engine-args, --extra-engine-args, flag or variable, default. Only the model is always the flag's, since
frontends use it too. `--dump-config-to FILE` writes the result as JSON.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trtllm_disagg import __version__
from trtllm_disagg.config.image_checks import image_errors, image_warnings
from trtllm_disagg.config.settings import without_password
from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig, check_value, flag_of
from trtllm_disagg.config.yaml_file import read_json, read_mapping
from trtllm_disagg.engine.declared_arguments import tensorrt_llm_arguments
from trtllm_disagg.engine.table import ENGINES, TENSORRT_LLM_BACKENDS, EngineSpec, named
from trtllm_disagg.errors import ConfigError

log = logging.getLogger(__name__)

Args = dict[str, Any]

KV_EVENT_BUFFER_SIZE = 100_000
_BLOCK_SIZE_KEY = "kv_cache_config.tokens_per_block"
#: Maximum characters of a wrong text in an error.
_MAX_SHOWN = 200

#: Setting of WorkerConfig -> its engine argument.
_SAME_KEYS = (
    "model load_format tensor_parallel_size pipeline_parallel_size enable_attention_dp gpus_per_node max_batch_size "
    "max_num_tokens max_seq_len max_beam_width guided_decoding_backend"
)
ENGINE_KEYS = {name: name for name in _SAME_KEYS.split()} | {
    "expert_parallel_size": "moe_expert_parallel_size",
    "kv_block_size": _BLOCK_SIZE_KEY,
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
}


def build_engine_args(config: WorkerConfig) -> Args:
    """This worker's arguments of LLM(...). Raises ConfigError for wrong ones.

    Resolve `engine="auto"` first: only the embedded engine's keys are all known. TensorRT-LLM also gets unknown keys,
    unless they look misspelt.
    """
    from_file = _read_yaml(config)
    flag = config.override_flag
    from_json = override_of(config.override_engine_args, config.engine_spec, flag)
    _check_block_size(config, {config.extra_engine_args: from_file, flag: from_json})

    args = merged_args(_dynamo_defaults(config), from_file)
    for _, sentence in _overruled(args, config):
        log.warning("%s", sentence)
    args = merged_args(args | {"model": config.model}, from_json)

    _strip(args)
    _check_model(args["model"])
    _check_engine(args, config)
    _check_role(args, config)
    _set_up_events(args, config)
    _check_statistics(args, config)
    check_images(config, args)
    return args


def with_engine_args(config: WorkerConfig, args: Mapping[str, Any]) -> WorkerConfig:
    """The configuration with the engine arguments' sizes, for the model card."""
    sizes = {name: args.get(name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
    known = {name: value for name, value in sizes.items() if value is not None}
    for name, value in known.items():
        check_value(name, value, key=name)  # else the configuration blames the flag, perhaps not given
    block_size = _get(args, _BLOCK_SIZE_KEY)
    return replace(config, **known, kv_block_size=block_size or config.kv_block_size)


# -- the three sources


def _dynamo_defaults(config: WorkerConfig) -> Args:
    """The arguments of Dynamo's worker without a file: its defaults, the engine's, and the flags."""
    args: Args = {
        "scheduler_config": {
            "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
            "dynamic_batch_config": {
                "enable_batch_size_tuning": True,
                "enable_max_num_tokens_tuning": False,
                "dynamic_batch_moving_average_window": 128,
            },
        },
        # As in Dynamo's worker, each request decides whether it is measured.
        "return_perf_metrics": False,
        "enable_iter_perf_stats": config.reads_statistics,
        **config.engine_spec.defaults,
    }
    if config.role is not Role.AGG:
        # KV transfer needs a transceiver: a pair's worker has one unless a file disables it.
        args["cache_transceiver_config"] = {"backend": "DEFAULT"}
    for name, key in ENGINE_KEYS.items():
        value = getattr(config, name)
        if name == "kv_block_size" and not config.is_explicit(name):
            continue  # TensorRT-LLM chooses 64 or 128 for some models
        if value is not None and (key not in args or config.is_explicit(name)):
            _set(args, key, value)
    return args


def _read_yaml(config: WorkerConfig) -> Args:
    source = config.extra_engine_args
    if not source:
        return {}
    path = Path(os.path.expanduser(source))
    # Launch scripts and the worker both read the file, which a pipe does not allow.
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError.bad_value(flag_of("extra_engine_args"), source, "a YAML file that exists")
    content = read_mapping(path, flag_of("extra_engine_args"))
    return check_engine_keys(content, source, config.engine_spec)


def override_of(text: str, engine: EngineSpec, flag: str = "--override-engine-args") -> Args:
    """The engine arguments in the JSON of `flag`. Raises ConfigError."""
    return check_engine_keys(_parsed_json(text), flag, engine)


def _parsed_json(text: str) -> Any:
    try:
        return read_json(text) if text else {}
    # ValueError: a number of thousands of digits. RecursionError: thousands of levels.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{flag_of('override_engine_args')} is not JSON: {error} in {text[:_MAX_SHOWN]!r}"
        ) from error


def with_flags(from_file: Mapping[str, Any], config: WorkerConfig) -> tuple[Args, list[str]]:
    """The unchecked arguments of file and flags, without defaults and model; a sentence per overruled flag."""
    flags: Args = {}
    for name, key in ENGINE_KEYS.items():
        if name != "model" and config.is_explicit(name):
            _set(flags, key, getattr(config, name))
    together = merged_args(flags, from_file)
    override = _parsed_json(config.override_engine_args)
    if not isinstance(override, Mapping):
        raise ConfigError(f"{flag_of('override_engine_args')}: expected keys with values")
    return merged_args(together, override), [
        sentence for name, sentence in _overruled(together, config) if name != "model"
    ]


def _overruled(args: Args, config: WorkerConfig) -> Iterator[tuple[str, str]]:
    """(setting, sentence with both values) per overruled flag. `args`: flags and file together."""
    source = config.extra_engine_args
    for name, key in ENGINE_KEYS.items():
        if not config.is_explicit(name):
            continue
        value, other = getattr(config, name), _get(args, key)
        if other == value:
            continue
        if name == "model":
            yield name, f"{flag_of(name)} {value} wins over {key}: {other} of {source}"
        else:
            yield name, f"{key}: {other} of {source} wins over {flag_of(name)} {value}"


# -- checks of the whole


def _check_block_size(config: WorkerConfig, sources: Mapping[str, Args]) -> None:
    """The router counts blocks of --kv-block-size, so the engine must use that size."""
    if not config.is_explicit("kv_block_size"):
        return
    for source, content in sources.items():
        given = _get(content, _BLOCK_SIZE_KEY)
        if given is not None and given != config.kv_block_size:
            raise ConfigError(
                f"{_at(source, _BLOCK_SIZE_KEY)}: {given} is not allowed; expected {config.kv_block_size} as in "
                f"{flag_of('kv_block_size')}, or leave out one of the two"
            )


def _check_model(model: object) -> None:
    """Check that a path is a model directory; does not check hub names."""
    name = str(model)
    path = Path(os.path.expanduser(name))
    # A hub name has at most one slash, and does not start with these.
    if not (name.startswith(("/", ".", "~")) or name.count("/") > 1 or os.path.exists(path)):
        return
    if not os.path.isdir(path):
        raise ConfigError.bad_value(flag_of("model"), name, "a directory that exists")
    if not (path / "config.json").is_file():
        raise ConfigError.bad_value(flag_of("model"), name, "a directory with config.json in it")


def _check_engine(args: Args, config: WorkerConfig) -> None:
    for name in args.keys() & ENGINES.keys() - {config.engine}:
        raise ConfigError.bad_value(name, args[name], f"no value, on the engine {config.engine}")
    if config.engine_spec.takes_embedded_arguments:
        return
    if args.pop("skip_tokenizer_init", None):
        # TensorRT-LLM would then refuse every request without an end token.
        log.warning("skip_tokenizer_init has no effect: the engine's tokenizer says where an answer ends")
    backend = _get(args, "cache_transceiver_config.backend")
    if backend not in (None, *TENSORRT_LLM_BACKENDS):
        allowed = f"one of {', '.join(TENSORRT_LLM_BACKENDS)}, on the engine {config.engine}"
        raise ConfigError.bad_value("cache_transceiver_config.backend", backend, allowed)
    width = args["max_beam_width"]
    if config.engine_spec.is_tensorrt_llm and width not in (1, None):
        allowed = f"1: {config.engine} serves only requests of that many beams, and those here have one"
        raise ConfigError.bad_value("max_beam_width", width, allowed)


def _check_role(args: Args, config: WorkerConfig) -> None:
    if config.role is Role.AGG:
        return
    key = "cache_transceiver_config.backend"
    if _get(args, key) is None:
        where = config.extra_engine_args or f"{flag_of('extra_engine_args')} (not given)"
        allowed = f"NIXL, or another backend, in mode {config.role}: without one, KV cannot move"
        raise ConfigError.bad_value(f"{where}: {key}", None, allowed)
    width = args["max_beam_width"]
    if width not in (1, None):
        raise ConfigError.bad_value("max_beam_width", width, f"1 in mode {config.role}: KV carries one beam")
    if config.schedule_style is ScheduleStyle.GENERATION_FIRST and config.engine_spec.rank_server:
        ranks = args.get("tensor_parallel_size", 1)
        if ranks != 1:
            raise ConfigError.bad_value(
                "tensor_parallel_size", ranks, f"1 with {flag_of('schedule_style')} generation_first"
            )


def _set_up_events(args: Args, config: WorkerConfig) -> None:
    """Enable the engine's buffer of KV events, which is off by default."""
    if not (config.publish_kv_events or config.informs_peers or config.reads_kv_events):
        return
    readers = ("publish_kv_events", "next_router", "prefill_decider")
    flag = flag_of(next((name for name in readers if config.is_explicit(name)), "publish_kv_events"))
    key = "kv_cache_config.kv_events_config.enable_kv_cache_events"
    if _get(args, key):
        raise ConfigError.bad_value(key, True, f"false with {flag}, which polls the events")
    if not _get(args, "kv_cache_config.event_buffer_max_size"):
        _set(args, "kv_cache_config.event_buffer_max_size", KV_EVENT_BUFFER_SIZE)
    if _get(args, "kv_cache_config.enable_block_reuse") is False:
        log.warning("%s has little to publish: kv_cache_config.enable_block_reuse is false", flag)


def _check_statistics(args: Args, config: WorkerConfig) -> None:
    """Enable step statistics, which load, metrics and drain read, but many published recipes turn off."""
    if config.reads_statistics and args.get("enable_iter_perf_stats") is False:
        log.warning("enable_iter_perf_stats is set to true: %s reads them", flag_of("publish_metrics"))
        args["enable_iter_perf_stats"] = True
    interval = args.get("iter_perf_stats_interval")
    if config.reads_statistics and interval not in (None, 1):
        log.warning("iter_perf_stats_interval %s: load, metrics and drain skip steps", interval)


def check_images(config: WorkerConfig, args: Mapping[str, Any]) -> None:
    """Raises ConfigError for an engine that must not serve images; warns of doubts."""
    for error in image_errors(config, args):
        raise error
    for sentence in image_warnings(config, args):
        log.warning("%s", sentence)


def _strip(args: Args) -> None:
    """Remove arguments that Dynamo decides."""
    backend = args.pop("backend", None)
    if backend not in (None, "pytorch"):
        raise ConfigError.bad_value("backend", backend, "pytorch")
    if args.pop("num_postprocess_workers", None):
        log.warning("num_postprocess_workers has no effect: Dynamo's frontend does that work")


# -- nested dictionaries with dotted keys


def _get(args: Mapping[str, Any], key: str) -> Any:
    value: Any = args
    for name in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _set(args: Args, key: str, value: object) -> None:
    *path, name = key.split(".")
    for part in path:
        if not isinstance(args.get(part), dict):
            args[part] = {}
        args = args[part]
    args[name] = value


def merged_args(base: Mapping[str, Any], update: Mapping[str, Any]) -> Args:
    """`base` updated recursively by `update`. An explicit null replaces a value."""
    merged = dict(base)
    for key, value in update.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merged_args(old, value) if both and old is not None else value
    return merged


# -- the check of one source


def check_engine_keys(content: object, source: str, engine: EngineSpec) -> dict[str, Any]:
    """Check keys and types against the engine's declared arguments. Unknown keys are refused if the declaration is
    complete, else only misspellings: another TensorRT-LLM may have more keys, and checks them itself.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: expected keys with values, got {type(content).__name__}")
    try:
        # A file needs no model: the model has a flag.
        declared = declared_arguments(engine)
        declared.model_validate({"model": "any", **content})
    except ValidationError as errors:
        for error in errors.errors(include_url=False, include_context=False):
            _raise_for(error, content, source, engine)
    return content


def declared_arguments(engine: EngineSpec) -> type[BaseModel]:
    """The arguments of LLM(...) known before importing the engine."""
    declared: type[BaseModel] = named(engine.arguments) if engine.arguments else tensorrt_llm_arguments()
    return declared


def _raise_for(error: Mapping[str, Any], content: dict[str, Any], source: str, engine: EngineSpec) -> None:
    path = _path_inside(error["loc"], content)
    key = ".".join(path)
    if error["type"] == "invalid_key":
        raise ConfigError.bad_value(_at(source, "a key"), error["input"], "a text")
    if error["type"] != "extra_forbidden":
        allowed = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise ConfigError.bad_value(_at(source, key or "content"), error["input"], allowed)
    hint = _hint(path, engine)
    if hint:
        where = f"{_at(source, key)}: unknown key" if source.endswith(".") else f"{source}: unknown key {key}"
        raise ConfigError(f"{where} (value {error['input']!r}); {hint}")


def _at(source: str, key: str) -> str:
    """Names a key in a file, or its flag (`--trtllm.KEY`)."""
    return f"{source}{key}" if source.endswith(".") else f"{source}: {key}"


def _path_inside(location: Iterable[Any], content: Any) -> list[str]:
    """pydantic's location without the union members that it adds."""
    path: list[str] = []
    for part in location:
        with suppress(KeyError, IndexError, TypeError):
            content = content[part]
            path.append(str(part))
    return path


def _hint(path: list[str], engine: EngineSpec) -> str:
    """The nearest or the allowed keys; empty if TensorRT-LLM may know the key."""
    declared, is_all = declared_arguments(engine), engine.has_known_arguments
    if close := nearest_key(declared, path, cutoff=0.6 if is_all else 0.9):
        return f"did you mean {close}?"
    return "allowed: " + ", ".join(sorted(_known_keys(declared, path[:-1]))) if is_all else ""


def nearest_key(declared: type[BaseModel], path: Sequence[str], cutoff: float = 0.75) -> str:
    """The dotted name of the closest argument of LLM(...), or empty."""
    *owner, name = path
    close = difflib.get_close_matches(name, _known_keys(declared, owner), n=1, cutoff=cutoff)
    return ".".join([*owner, close[0]]) if close else ""


def _known_keys(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    for name in path:
        model = _nested_model(model, name)
    return list(model.model_fields)


def _nested_model(model: type[BaseModel], name: str) -> type[BaseModel]:
    annotation = model.model_fields[name].annotation
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next(item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel))


def dump_config(config: WorkerConfig, engine_args: Mapping[str, Any]) -> None:
    """Write --dump-config-to, if given. Raises ConfigError if the file cannot be written."""
    if config.dump_config_to is None:
        return
    worker = asdict(config) | {"nats_server": config.nats_server and without_password(config.nats_server)}
    # The keys of Dynamo's dump.
    content = {"version": __version__, "dynamo_args": worker, "engine_args": engine_args}
    try:
        text = json.dumps(
            content, indent=2, default=lambda each: sorted(each) if isinstance(each, frozenset) else str(each)
        )
        Path(os.path.expanduser(config.dump_config_to)).write_text(f"{text}\n")
    except OSError as error:
        allowed = f"a file that can be written ({error.strerror})"
        raise ConfigError.bad_value(flag_of("dump_config_to"), config.dump_config_to, allowed) from error
