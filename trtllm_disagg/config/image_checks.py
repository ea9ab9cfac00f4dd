"""Judges, before an engine is built, whether it may serve images (`--enable-multimodal`). Workers, `up` and `doctor`
ask here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError

FLAG = "--enable-multimodal"
REUSE = "kv_cache_config.enable_block_reuse"
#: `model_type`s of config.json without `vision_config` that take images.
_PHI4 = ("phi4mm", "phi4_multimodal")


def model_type_of(model: object) -> tuple[str, bool]:
    """`model_type` in the model's config.json, and whether it takes images. Empty for a model that is not here."""
    try:
        config = json.loads((Path(os.path.expanduser(str(model))) / "config.json").read_text())
        name = str(config.get("model_type", ""))
    except (OSError, ValueError, RecursionError, AttributeError):
        return "", False
    return name, bool(config.get("vision_config")) or name in _PHI4


def reuses_blocks(args: Mapping[str, Any]) -> bool:
    """`args`: of LLM(...); TensorRT-LLM's default is true."""
    return bool((args.get("kv_cache_config") or {}).get("enable_block_reuse", True))


def image_errors(config: WorkerConfig, args: Mapping[str, Any]) -> Iterator[ConfigError]:
    """What makes a worker with these arguments of LLM(...) answer wrongly or fail; none without `FLAG`."""
    if config.images is None or not config.engine_spec.is_tensorrt_llm or config.role is Role.AGG:
        return
    if config.role is Role.DECODE and reuses_blocks(args):
        why = "decode knows blocks by text alone, so an image could get the KV of another one of equal size"
        yield ConfigError.bad_value(REUSE, True, f"false on a decode worker with {FLAG}: {why}")
    if model_type_of(args.get("model"))[0].startswith("gemma4"):
        allowed = f"another model in mode {config.role} with {FLAG}: TensorRT-LLM serves Gemma 4's images in agg only"
        yield ConfigError.bad_value("--model", args["model"], allowed)


def image_warnings(config: WorkerConfig, args: Mapping[str, Any]) -> Iterator[str]:
    """A sentence per doubt about a worker with these arguments of LLM(...); none without `FLAG`."""
    name, has_images = model_type_of(args.get("model"))
    if config.images is None or not name:
        return
    if not has_images:
        yield f"{FLAG}: {args['model']} has no vision_config in config.json, so it may take no images"
    if not config.engine_spec.is_tensorrt_llm:
        return
    if name in ("gemma3", "llama4") and (reuses_blocks(args) or args.get("enable_chunked_prefill")):
        settings = f"{REUSE} and enable_chunked_prefill are false"
        yield f"{FLAG}: {name} may answer wrongly about images unless {settings}"
    if name in _PHI4:
        yield f"{FLAG}: {name}'s second image may end the engine (TensorRT-LLM issue 14125)"
