"""The embedded engine as `tensorrt_llm`: what clients find there, and the ways to put it there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mount import (
    MOUNTED,
    NOT_SERVED,
    ROOT,
    mount_as_tensorrt_llm,
    update_llm_args_with_extra_options,
)
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.engine.table import resolve_engine
from trtllm_disagg.engines import embedded
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs, refuse_unsupported

#: What upstream imports in a `try`, or for images and video only.
OPTIONAL = {
    "tensorrt_llm.visual_gen",
    "tensorrt_llm.visual_gen.args",
    "tensorrt_llm.llmapi.BuildConfig",
    "tensorrt_llm.executor.request.GenerationRequest",
}


@pytest.fixture
def unmounted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = dict(sys.modules)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == ROOT]:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in before.items() if name.partition(".")[0] == ROOT})


@pytest.fixture
def mounted(unmounted: None) -> Any:
    return mount_as_tensorrt_llm()


@pytest.mark.parametrize("part", [*MOUNTED, *NOT_SERVED])
def test_every_name_of_the_tables_can_be_imported(mounted: Any, part: str) -> None:
    module = importlib.import_module(f"{ROOT}.{part}".rstrip("."))

    names = f"{MOUNTED.get(part, '')} {NOT_SERVED.get(part, '')}".split()
    assert [name for name in names if not hasattr(module, name)] == []


def upstream_imports() -> Iterator[tuple[str, str | None]]:
    """(module, name) of each import of tensorrt_llm in upstream's worker; `import module` has no name."""
    spec = importlib.util.find_spec("dynamo.trtllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for file in Path(spec.submodule_search_locations[0]).rglob("*.py"):
        if "tests" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == ROOT:
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((a.name, None) for a in node.names if a.name.partition(".")[0] == ROOT)


@pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="ai-dynamo is not installed")
def test_mounted_package_has_every_import_of_upstreams_worker(mounted: Any) -> None:
    imports = set(upstream_imports())
    assert ("tensorrt_llm.llmapi", "KvCacheConfig") in imports, "upstream's worker was not found"

    missing = set()
    for module, name in imports:
        if module not in OPTIONAL and f"{module}.{name}" not in OPTIONAL:
            found = importlib.import_module(module)
            if name is not None and not hasattr(found, name):
                missing.add(f"{module}.{name}")
    assert missing == set()


def test_own_worker_resolves_auto_to_the_mounted_package(mounted: Any) -> None:
    assert resolve_engine("auto") == "tensorrt_llm"
    assert load_api("tensorrt_llm").llm is embedded.LLM


def test_name_in_no_table_of_the_mounted_package_does_not_exist(mounted: Any) -> None:
    with pytest.raises(ModuleNotFoundError, match="visual_gen"):
        importlib.import_module("tensorrt_llm.visual_gen")
    with pytest.raises(ImportError, match="BuildConfig"):
        exec("from tensorrt_llm.llmapi import BuildConfig")


# -- names of its own


def test_dynamos_engine_arguments_are_accepted(mounted: Any, tmp_path: Path) -> None:
    """As upstream's llm_worker.py builds them without a flag, but for --gpus-per-node."""
    from tensorrt_llm import llmapi

    path = tmp_path / "prefill.yaml"
    path.write_text("kv_cache_config: {tokens_per_block: 64}\ncache_transceiver_config: {backend: DEFAULT}\n")
    defaults = {
        "model": "m",
        "scheduler_config": llmapi.SchedulerConfig(
            capacity_scheduler_policy=llmapi.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            dynamic_batch_config=llmapi.DynamicBatchConfig(),
        ),
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "moe_expert_parallel_size": None,
        "enable_attention_dp": False,
        "kv_cache_config": llmapi.KvCacheConfig(free_gpu_memory_fraction=0.5),
        "gpus_per_node": 1,
        "max_num_tokens": 8192,
        "max_seq_len": None,
        "max_beam_width": 1,
        "max_batch_size": 2048,
        "return_perf_metrics": False,
        "enable_iter_perf_stats": True,
        "kv_connector_config": None,
        "load_format": "auto",
    }
    arguments = update_llm_args_with_extra_options(defaults, str(path))

    assert arguments["kv_cache_config"] == {"free_gpu_memory_fraction": 0.5, "tokens_per_block": 64}
    assert refuse_unsupported(LlmArgs(**arguments)) == ["gpus_per_node"]
