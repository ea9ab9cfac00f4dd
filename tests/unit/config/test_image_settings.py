"""The flags of images, and the checks of a worker that serves them, before its engine is built."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker_args import parse_worker_args
from trtllm_disagg.config.engine_args import build_engine_args, check_images
from trtllm_disagg.config.worker_config import ImageConfig, WorkerConfig
from trtllm_disagg.errors import ConfigError

REUSE_OFF = {"kv_cache_config": {"enable_block_reuse": False}}
QWEN = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}}


def config_of(tmp_path: Path, model: dict[str, Any] | None = None, **values: Any) -> WorkerConfig:
    (tmp_path / "config.json").write_text(json.dumps(model or QWEN))
    given: dict[str, Any] = {"engine": "tensorrt_llm", "role": "decode", "enable_multimodal": True} | values
    return WorkerConfig(model=str(tmp_path), **given)


def arguments(config: WorkerConfig, **args: Any) -> dict[str, Any]:
    return build_engine_args(WorkerConfig(model=config.model)) | args


@pytest.mark.parametrize(
    ("argv", "environ", "images"),
    [
        ([], {}, None),
        (["--modality", "text", "--no-enable-multimodal"], {}, None),
        (["--enable-multimodal"], {}, ImageConfig(50)),
        (["--modality", "multimodal", "--max-file-size-mb", "8"], {}, ImageConfig(8)),
        ([], {"DYN_TRTLLM_ENABLE_MULTIMODAL": "true", "DYN_TRTLLM_MAX_FILE_SIZE_MB": "9"}, ImageConfig(9)),
    ],
)
def test_images_are_on_by_dynamos_flags_and_variables(
    argv: list[str], environ: dict[str, str], images: ImageConfig | None
) -> None:
    assert parse_worker_args(["--model", "m", *argv], environ).images == images


def test_generation_first_with_images_is_refused_by_name() -> None:
    flags = ["--disaggregation-mode", "decode", "--schedule-style", "generation_first"]
    with pytest.raises(ConfigError, match=r"^--schedule-style: 'generation_first' .*--enable-multimodal"):
        parse_worker_args(["--model", "m", "--enable-multimodal", *flags], {})


@pytest.mark.parametrize("strategy", ["prefill_first", "decode_first", "auto", "router"])
def test_decode_worker_that_reuses_blocks_is_refused(tmp_path: Path, strategy: str) -> None:
    config = config_of(tmp_path, strategy=strategy)
    with pytest.raises(ConfigError, match=r"^kv_cache_config.enable_block_reuse: True .* expected false"):
        build_engine_args(config)
    off = json.dumps(REUSE_OFF)
    build_engine_args(config_of(tmp_path, strategy=strategy, override_engine_args=off))


@pytest.mark.parametrize(
    "values",
    [{"role": "prefill"}, {"role": "agg"}, {"engine": "embedded"}, {"enable_multimodal": False}],
    ids=str,
)
def test_other_workers_may_reuse_blocks(tmp_path: Path, values: dict[str, Any]) -> None:
    build_engine_args(config_of(tmp_path, **values))


def test_gemma_4_with_images_is_refused_in_a_pair_only(tmp_path: Path) -> None:
    gemma = {"model_type": "gemma4", "vision_config": {}}
    with pytest.raises(ConfigError, match=r"^--model: .*Gemma 4"):
        build_engine_args(config_of(tmp_path, gemma, role="prefill"))
    build_engine_args(config_of(tmp_path, gemma, role="agg"))


@pytest.mark.parametrize(
    ("model", "args", "warning"),
    [
        (QWEN, {}, ""),
        ({"model_type": "llama"}, {}, "has no vision_config in config.json"),
        ({"model_type": "gemma3", "vision_config": {"a": 1}}, {}, "gemma3 may answer wrongly"),
        ({"model_type": "gemma3", "vision_config": {"a": 1}}, REUSE_OFF, ""),
        (
            {"model_type": "llama4", "vision_config": {"a": 1}},
            REUSE_OFF | {"enable_chunked_prefill": True},
            "llama4 may answer wrongly",
        ),
        ({"model_type": "phi4mm"}, {}, "phi4mm's second image may end the engine"),
    ],
)
def test_doubtful_model_is_named_in_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    model: dict[str, Any],
    args: dict[str, Any],
    warning: str,
) -> None:
    config = config_of(tmp_path, model, role="agg")
    with caplog.at_level(logging.WARNING):
        check_images(config, arguments(config, **args))
    assert [warning in message for message in caplog.messages] == ([True] if warning else [])
