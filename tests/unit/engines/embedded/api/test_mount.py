"""The embedded engine as `tensorrt_llm`: what clients find there, and the ways to put it there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.models import write_tokenizer
from trtllm_disagg.engine.engines import resolve_engine
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.engines import embedded
from trtllm_disagg.engines.embedded import mount
from trtllm_disagg.engines.embedded.api.perf_metrics import MetricNames
from trtllm_disagg.engines.embedded.mount import (
    MOUNTED,
    NOT_SERVED,
    ROOT,
    MetricsCollector,
    mount_as_tensorrt_llm,
    tokenizer_factory,
    update_llm_args_with_extra_options,
)
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs, refuse_unsupported
from trtllm_disagg.errors import ConfigError

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


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """In a fresh interpreter, with `path` in front of everything else."""
    root = str(Path(embedded.__file__).parents[4])
    environment = {"PYTHONPATH": root if path is None else f"{path}:{root}"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=200
    )


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


@pytest.mark.parametrize("use", [lambda name: name(), lambda name: name.from_dict({})])
def test_using_a_placeholder_name_raises_not_implemented(mounted: Any, use: Any) -> None:
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer

    assert not isinstance(None, SharedTensorContainer)
    with pytest.raises(NotImplementedError, match=r"shared_tensor\.SharedTensorContainer.* is not served"):
        use(SharedTensorContainer)


def test_name_in_no_table_of_the_mounted_package_does_not_exist(mounted: Any) -> None:
    with pytest.raises(ModuleNotFoundError, match="visual_gen"):
        importlib.import_module("tensorrt_llm.visual_gen")
    with pytest.raises(ImportError, match="BuildConfig"):
        exec("from tensorrt_llm.llmapi import BuildConfig")
    with pytest.raises(AttributeError, match="BuildConfig"):
        embedded.__getattr__("BuildConfig")


def test_second_mount_returns_the_first(mounted: Any) -> None:
    assert mount_as_tensorrt_llm() is mounted
    assert sum(type(finder).__module__ == mount.__name__ for finder in sys.meta_path) == 1


# -- the ways to mount


def test_the_runner_runs_a_module_as_main(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(
        "import sys, tensorrt_llm as t\nprint(__name__, t.LLM.__module__, sys.argv[1:])"
    )

    done = run(
        "-m", "trtllm_disagg.engines.embedded.mount", "-m", "client", "--force", "-m", "x", path=tmp_path
    )

    assert done.stderr == ""
    assert done.stdout == "__main__ trtllm_disagg.engines.embedded.api.llm ['--force', '-m', 'x']\n"


@pytest.mark.parametrize("arguments", [[], ["-m"]])
def test_the_runner_needs_a_module(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mount.main(arguments)
    assert "-m" in capsys.readouterr().err


def test_a_folder_on_the_path_may_mount(tmp_path: Path) -> None:
    (tmp_path / ROOT).mkdir()
    (tmp_path / ROOT / "__init__.py").write_text(
        "from trtllm_disagg.engines.embedded.mount import mount_as_tensorrt_llm\nmount_as_tensorrt_llm()\n"
    )
    client = (
        "from tensorrt_llm.llmapi.llm_args import LoadFormat\n"
        "import tensorrt_llm\n"
        "print(tensorrt_llm.__version__, tensorrt_llm.executor.utils.RequestError.__module__)"
    )

    done = run("-c", client, path=tmp_path)

    assert done.stderr == ""
    assert done.stdout == "1.3.0rc29+embedded trtllm_disagg.engines.embedded.api.result\n"


def test_embedded_package_can_replace_every_mounted_module(
    unmounted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in {*MOUNTED, *NOT_SERVED}:
        monkeypatch.setitem(sys.modules, f"{ROOT}.{part}".rstrip("."), embedded)

    from tensorrt_llm import LLM, MultimodalEncoder
    from tensorrt_llm.llmapi.llm_args import TOKENIZER_ALIASES, BaseLlmArgs, KvCacheConnectorConfig

    assert LLM is embedded.LLM
    assert (TOKENIZER_ALIASES, BaseLlmArgs.model_fields["max_beam_width"].default) == ({}, 1)
    for placeholder in (MultimodalEncoder, KvCacheConnectorConfig):
        with pytest.raises(NotImplementedError):
            placeholder()


def test_an_installed_tensorrt_llm_is_not_hidden_unasked(
    unmounted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "tensorrt_llm-1.3.0rc29.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.3.0rc29\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigError, match=r"tensorrt_llm 1\.3\.0rc29 is installed.*force"):
        mount_as_tensorrt_llm()
    assert mount_as_tensorrt_llm(force=True).__version__ == mount.VERSION


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


def test_the_tokenizer_wraps_transformers_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_tokenizer(tmp_path)

    tokenizer = tokenizer_factory(str(tmp_path), trust_remote_code=True)

    assert tokenizer.tokenizer.bos_token_id == tokenizer.bos_token_id == 0
    assert tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)) == "hello"
    assert tokenizer("hello")["input_ids"] == tokenizer.encode("hello")
    assert tokenizer_factory(tokenizer) is tokenizer
    assert tokenizer_factory(tokenizer.tokenizer).tokenizer is tokenizer.tokenizer


def test_the_metrics_have_tensorrt_llms_names(monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    made = {
        kind: lambda *args, kind=kind, **kwargs: getattr(prometheus, kind)(*args, registry=registry, **kwargs)
        for kind in ("Gauge", "Counter", "Histogram")
    }
    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(**made))
    collector = MetricsCollector({"model_name": "m"})

    collector.log_iteration_stats(
        {"numActiveRequests": 3, "kvCacheStats": {"usedNumBlocks": 2, "maxNumBlocks": 8}}
    )
    collector.log_request_metrics_dict(
        {"finished_reason": "stop", MetricNames.TTFT: 0.25, MetricNames.TPOT: 0.01}
        | {MetricNames.GENERATION_TOKENS: 7}
    )
    collector.log_request_metrics_dict({})

    def value(name: str, **labels: str) -> float | None:
        sample: float | None = registry.get_sample_value(f"trtllm_{name}", {"model_name": "m", **labels})
        return sample

    assert value("num_requests_running") == 3
    assert value("kv_cache_utilization") == 0.25
    assert value("request_success_total", finished_reason="stop") == 1
    assert value("time_to_first_token_seconds_sum") == 0.25
    assert value("time_per_output_token_seconds_count") == 1
    assert value("e2e_request_latency_seconds_count") == 0
    assert value("generation_tokens_total") == 7
