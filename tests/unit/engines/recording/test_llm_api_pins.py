"""The stand-in, the embedded engine and our own calls, against TensorRT-LLM's LLM API as its source has it."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tests.support.handling import request
from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.declared_arguments import tensorrt_llm_arguments
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.engine.trtllm_version import default_runtime
from trtllm_disagg.engines import embedded
from trtllm_disagg.engines.embedded.params import llm_args
from trtllm_disagg.engines.embedded.params.llm_args import CacheTransceiverConfig, LlmArgs
from trtllm_disagg.engines.recording import llm as recording
from trtllm_disagg.engines.recording.llm import LLM, DisaggregatedParams
from trtllm_disagg.types import PrefillResult
from trtllm_disagg.wire.bodies import encode_disaggregated_params

ROOT = Path(__file__).parents[4]
PINS = {
    path.stem: json.loads(path.read_text()) for path in (ROOT / "trtllm_disagg/engine/pins").glob("*.json")
}
#: Single files of the time before 1.2.0 and after 1.3.0rc21; the others are each of one release.
OLD, NEW = "1.2.0rc", "1.3.0rc"
#: What `pip install tensorrt-llm` brings, and the first release that `doctor` takes.
STABLE, FIRST_SUPPORTED = "1.2.1", "1.3.0rc22"
#: After the release that the project is written for: what could be read of them.
NEXT, AFTER_NEXT = "1.4.0rc1", "1.4.0rc4"
#: The newest release of which a class could be read whole, up to the one that the project is written for.
NEWEST = {
    "DisaggregatedParams": "1.3.0rc29",
    "CompletionOutput": "1.3.0rc29",
    "generate_async": "1.3.0rc28",
    "RequestOutput": "1.3.0rc27",
    "SamplingParams": "1.3.0rc26",
    "GuidedDecodingParams": OLD,
    "LLM": NEW,
}

#: LlmArgs that the embedded engine does not even know by name: a model's file that has one is refused.
NOT_FOR_A_CPU = {
    "checkpoint_format",
    "checkpoint_io_policy",
    "checkpoint_loader",
    "decoding_config",
    "disable_mm_encoder",
    "enable_encoder_decoder_mixed_cuda_graph",
    "enable_energy_metrics",
    "enable_in_graph_sampling",
    "enable_layerwise_nvtx_marker",
    "enable_low_latency_host_dispatch",
    "enable_min_latency",
    "enable_mla_skip_correction",
    "enable_resource_governor",
    "enable_speculative_beam_history_d2h",
    "encode_only",
    "encoder_cuda_graph_config",
    "encoder_max_batch_size",
    "encoder_max_num_tokens",
    "force_dynamic_quantization",
    "gms_config",
    "layer_wise_benchmarks_config",
    "mla_skip_correction_threshold",
    "mm_encoder_only",
    "mpi_session",
    "multimodal_config",
    "mx_config",
    "postprocess_tokenizer_dir",
    "prefill_capture_num_tokens",
    "prefill_cuda_graph_backend",
    "ray_placement_config",
    "ray_worker_extension_cls",
    "ray_worker_nsight_options",
    "reorder_policy_config",
    "sampler_force_async_worker",
    "use_cute_dsl_bf16_bmm",
    "use_cute_dsl_bf16_gemm",
    "use_cute_dsl_blockscaling_bmm",
    "use_cute_dsl_blockscaling_mm",
    "use_fine_grained_sync",
}

#: The same of 1.3.0rc29, in which `decoding_config` is no field any more.
NEWER_NOT_FOR_A_CPU = {"enable_return_routed_experts", "enable_tokenization_cache"}

#: Of the release candidates of 1.2, gone since.
GONE = {"build_config", "enable_tqdm", "fail_fast_on_attention_window_too_large", "sampler_type"}


def facts(version: str, name: str, kind: str = "fields") -> dict[str, Any]:
    found: dict[str, Any] = PINS[version]["classes"][name][kind]
    return found


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    given = inspect.signature(function).parameters
    return {name: item.default for name, item in given.items() if name not in ("self", "kwargs")}


# -- the embedded engine and the stand-in


def test_every_pin_has_its_version_and_source() -> None:
    assert {OLD, NEW, STABLE, FIRST_SUPPORTED, NEXT, AFTER_NEXT, *NEWEST.values()} == set(PINS)
    for version, pin in PINS.items():
        assert pin["version"] == version
        assert all(pin["source"].values())


@pytest.mark.parametrize("llm", [embedded.LLM, LLM])
@pytest.mark.parametrize("method", ["__init__", "generate_async"])
def test_methods_take_what_tensorrt_llms_take(llm: type, method: str) -> None:
    ours = parameters(getattr(llm, method))
    methods = facts(NEWEST.get(method, NEW), "LLM", "methods")
    pinned = {name: fact for name, fact in methods[method].items() if name != "**kwargs"}
    assert list(ours) == list(pinned)
    names = {"DEFAULT_REQUEST_PRIORITY": recording.DEFAULT_REQUEST_PRIORITY}
    for name, (_, default) in pinned.items():
        assert ours[name] == (inspect.Parameter.empty if default is None else eval(default, names)), name


@pytest.mark.parametrize("llm", [embedded.LLM, LLM])
@pytest.mark.parametrize(
    "method", ["get_stats", "get_stats_async", "get_kv_cache_events", "get_kv_cache_events_async", "shutdown"]
)
def test_other_llm_methods_match_the_oldest_pin(llm: type, method: str) -> None:
    pinned = facts(OLD, "LLM", "methods")[method]
    assert {name: repr(default) for name, default in parameters(getattr(llm, method)).items()} == {
        name: default for name, (_, default) in pinned.items()
    }


#: An enum there, of which the engines here know no value.
WITHOUT = {"logprobs_mode"}


@pytest.mark.parametrize(
    "name", ["DisaggregatedParams", "SamplingParams", "GuidedDecodingParams", "CompletionOutput"]
)
@pytest.mark.parametrize("module", [embedded, recording])
def test_a_data_class_has_the_same_fields_and_defaults(module: Any, name: str) -> None:
    ours = {f.name: f for f in dataclasses.fields(getattr(module, name)) if not f.name.startswith("_")}
    pinned = {field: fact for field, fact in facts(NEWEST[name], name).items() if field not in WITHOUT}
    assert set(ours) == set(pinned)
    for field, (_, default) in pinned.items():
        if default is None:
            assert ours[field].default is dataclasses.MISSING
        elif default.endswith("()"):
            assert ours[field].default_factory is eval(default[:-2])
        else:
            assert ours[field].default == eval(default), field


@pytest.mark.parametrize(("version", "unknown"), [(OLD, GONE), (NEW, set())])
def test_llm_args_are_known_by_name(version: str, unknown: set[str]) -> None:
    pinned = set(facts(version, "LlmArgs"))
    assert pinned - set(LlmArgs.model_fields) == (NOT_FOR_A_CPU | unknown) & pinned
    if version == NEW:
        assert set(LlmArgs.model_fields) - pinned == {"embedded"}
        assert pinned >= NOT_FOR_A_CPU


def test_llm_args_of_the_newest_release_are_known_by_name() -> None:
    pinned = set(facts("1.3.0rc29", "LlmArgs", "names"))
    unknown = (NOT_FOR_A_CPU - {"decoding_config"}) | NEWER_NOT_FOR_A_CPU
    assert pinned - set(LlmArgs.model_fields) == unknown
    assert set(LlmArgs.model_fields) - pinned == {"embedded"}


#: A default object of TensorRT-LLM that does nothing here, and a backend that is always pytorch there.
OTHER_DEFAULTS = {"backend", "nvfp4_gemm_config", "telemetry_config"}


def test_defaults_of_llm_args_are_tensorrt_llms() -> None:
    pinned = {name: default for name, (_, default) in facts(NEW, "LlmArgs").items() if default is not None}
    ours = {name: LlmArgs.model_fields[name] for name in pinned if name in LlmArgs.model_fields}
    assert {name for name, field in ours.items() if not is_default(field, pinned[name])} == OTHER_DEFAULTS


def is_default(field: FieldInfo, written: str) -> bool:
    if field.default_factory is not None:
        return written == f"{field.default_factory.__name__}()"
    if isinstance(field.default, Enum):
        return written == f"{type(field.default).__name__}.{field.default.name}"
    try:
        return bool(ast.literal_eval(written) == field.default)
    except ValueError:
        return False


#: Of kv_cache_config, not known to the embedded engine: a model's file that has one is refused.
CACHE_NOT_FOR_A_CPU = {
    "disk_prefetch_num_reqs",
    "enable_kv_pool_rebalance",
    "enable_swa_scratch_reuse",
    "fp8_context_mla_kv_len_cap",
    "kv_pool_rebalance_check_interval",
    "kv_pool_rebalance_cooldown_secs",
    "kv_pool_rebalance_min_sampled_kv_caches",
    "kv_pool_rebalance_moving_average_decay",
    "kv_pool_rebalance_ratio_threshold",
    "kv_pool_rebalance_target_ratio_update_interval",
    "mamba_ssm_cache_dtype",
    "mamba_ssm_philox_rounds",
    "mamba_ssm_stochastic_rounding",
    "mamba_state_cache_interval",
}


@pytest.mark.parametrize(
    ("ours", "unknown", "other_defaults"),
    [
        # A default object of TensorRT-LLM that does nothing here.
        (llm_args.KvCacheConfig, CACHE_NOT_FOR_A_CPU, {"mamba_state_config"}),
        (llm_args.KVEventsConfig, set(), set()),
        (llm_args.BlockReuseConfig, set(), set()),
        (llm_args.DynamicBatchConfig, set(), set()),
        (llm_args.MoeConfig, set(), set()),
        (llm_args.AttentionDpConfig, set(), set()),
        # An enum of strings there.
        (llm_args.SchedulerConfig, set(), {"waiting_queue_policy"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_parts_of_llm_args_have_the_same_fields_and_defaults(
    ours: type[BaseModel], unknown: set[str], other_defaults: set[str]
) -> None:
    pinned = {name: str(default) for name, (_, default) in facts(NEW, ours.__name__).items()}
    assert set(pinned) - set(ours.model_fields) == unknown
    assert set(ours.model_fields) - set(pinned) == set()
    shared = ours.model_fields.items()
    assert {name for name, field in shared if not is_default(field, pinned[name])} == other_defaults


#: Of each type, those at the limits too.
VALUES: tuple[Any, ...] = (None, True, -1, 0, 1, 2, 7, 0.5, 1.5, "auto", "AUTO", "x", [], [1], [0.5], {})
#: What the embedded engine takes and TensorRT-LLM does not: mostly of what has no effect on a CPU, or is refused later.
TAKES_MORE: dict[str, list[Any]] = {
    "allreduce_strategy": ["auto", "x"],
    "backend": [None],
    "cuda_graph_config.max_batch_size": [None],
    "kv_cache_config.mamba_state_config": [None],
    "kv_cache_config.pool_ratio": [[]],
    "kv_connector_config": [value for value in VALUES if value not in (None, {})],
    "nvfp4_gemm_config": [None],
    "sleep_config": [value for value in VALUES if value not in (None, {})],
    "telemetry_config": [None],
}
#: The opposite.
TAKES_LESS: dict[str, list[Any]] = {
    "kv_cache_config.cross_kv_cache_fraction": [-1, 2, 7, 1.5],
    "load_format": [True],
}


def differences(
    ours: type[BaseModel], theirs: type[BaseModel], above: str = ""
) -> Iterator[tuple[str, Any, bool]]:
    """(key, value, whether it is ours that takes it) for each value that one of two classes takes."""
    for name in ours.model_fields.keys() & theirs.model_fields.keys():
        for value in VALUES:
            if (is_ours := takes(ours, name, value)) != takes(theirs, name, value):
                yield f"{above}{name}", value, is_ours
        sections = section(ours, name), section(theirs, name)
        if None not in sections:
            yield from differences(*sections, f"{above}{name}.")


def takes(owner: type[BaseModel], name: str, value: Any) -> bool:
    try:
        owner.model_validate(({"model": "m"} if "model" in owner.model_fields else {}) | {name: value})
    except ValidationError:
        return False
    return True


def section(owner: type[BaseModel], name: str) -> Any:
    annotation = owner.model_fields[name].annotation
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)), None)


def test_the_plugin_takes_the_values_for_tensorrt_llm_that_the_embedded_engine_takes() -> None:
    """The plugin checks files for TensorRT-LLM by the pins, and those for the embedded engine by classes."""
    found = list(differences(LlmArgs, tensorrt_llm_arguments()))
    more = [(key, value) for key, value, is_ours in found if is_ours]
    less = [(key, value) for key, value, is_ours in found if not is_ours]
    assert sorted(more, key=repr) == sorted(((k, v) for k, vs in TAKES_MORE.items() for v in vs), key=repr)
    assert sorted(less, key=repr) == sorted(((k, v) for k, vs in TAKES_LESS.items() for v in vs), key=repr)


@pytest.mark.parametrize("name", sorted(CACHE_NOT_FOR_A_CPU))
def test_what_only_tensorrt_llm_knows_of_a_cache_is_passed_to_it(name: str) -> None:
    value = ast.literal_eval(facts(NEW, "KvCacheConfig")[name][1])
    override = json.dumps({"kv_cache_config": {name: value}})
    config = WorkerConfig(model="org/model", engine="tensorrt_llm", override_engine_args=override)
    assert build_engine_args(config)["kv_cache_config"][name] == value


def test_the_cache_transceiver_is_configured_alike() -> None:
    ours = {name: repr(field.default) for name, field in CacheTransceiverConfig.model_fields.items()}
    assert ours == {name: default for name, (_, default) in facts(NEW, "CacheTransceiverConfig").items()}


def test_a_request_has_what_tensorrt_llms_has() -> None:
    pinned = {*facts(OLD, "RequestOutput", "methods"), *PINS[OLD]["classes"]["RequestOutput"]["attributes"]}
    pinned -= {"__init__", "id", "postproc_params", "sampling_params", "mm_embedding_handle"}
    made = LLM("m").generate_async([1, 2])
    missing = {name for name in pinned if not hasattr(made, name)}
    assert missing == {"aborted", "avg_decoded_tokens_per_iter", "clear_logprob_params"}
    newest = set(facts(NEWEST["RequestOutput"], "RequestOutput", "names"))
    missing = {name for name in newest if not hasattr(made, name)}
    assert missing == {"aborted", "clear_logprob_params", "do_tracing", "error", "record_stats"}


# -- the calls that we make


class Calls:
    """The LLM API, with the keywords of every call."""

    def __init__(self) -> None:
        self.keywords: dict[str, set[str]] = defaultdict(set)
        api = load_api("recording")
        spied = {
            name: self._spy(name, getattr(api, attribute))
            for name, attribute in (
                ("SamplingParams", "sampling_params"),
                ("GuidedDecodingParams", "guided_decoding_params"),
                ("DisaggregatedParams", "disaggregated_params"),
                ("LLM", "llm"),
            )
        }
        self.api = dataclasses.replace(
            api,
            sampling_params=spied["SamplingParams"],
            guided_decoding_params=spied["GuidedDecodingParams"],
            disaggregated_params=spied["DisaggregatedParams"],
            llm=spied["LLM"],
        )

    def _spy(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def spying(*args: Any, **kwargs: Any) -> Any:
            assert not args
            self.keywords[name] |= set(kwargs)
            return call(**kwargs)

        return spying


#: Sections that TensorRT-LLM has not.
_OTHER_ENGINES = re.compile(r"^(embedded|modelled):", re.MULTILINE)


def shipped() -> Iterator[WorkerConfig]:
    """Those of TensorRT-LLM."""
    configs = ROOT / "engine_configs"
    for path in sorted(configs.glob("*/*.yaml")):
        if not _OTHER_ENGINES.search(path.read_text()):
            yield WorkerConfig(
                model="org/model",
                role=Role.DECODE if path.stem == "flex" else Role(path.stem),
                engine="tensorrt_llm",
                extra_engine_args=str(path),
                publish_kv_events=True,
                publish_metrics=True,
            )


ASKED: dict[str, Any] = {
    "sampling_options": {
        "n": 1,
        "best_of": 1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
        "length_penalty": 1.0,
        "include_stop_str_in_output": True,
        "guided_decoding": {"regex": "a"},
    },
    "output_options": {"logprobs": 2, "prompt_logprobs": 1},
    "routing": {"cache_salt": "salt"},
    "priority": 0.7,
}
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture(scope="module")
def keywords() -> Iterator[dict[str, set[str]]]:
    """Of every shipped file, and of a request with every option, whole and in its two phases."""
    calls = Calls()
    for config in shipped():
        Engine.open(calls.api, build_engine_args(config), 0)
    asyncio.run(answer(calls))
    yield dict(calls.keywords)
    LLM.forget_instances()


async def answer(calls: Calls) -> None:
    args = {"model": "org/model", "max_seq_len": 99, "cache_transceiver_config": {"backend": "NIXL"}}
    more = {"enable_iter_perf_stats": True, "guided_decoding_backend": "xgrammar"}
    engine = Engine.open(calls.api, args | more, 0)
    asked = msgspec.structs.replace(request(**ASKED), trace_headers=TRACE)
    await engine.start_agg(asked).aresult()
    prefill = await engine.start_prefill(asked).aresult()
    result = PrefillResult(encode_disaggregated_params(prefill.outputs[0].disaggregated_params))
    decode = msgspec.structs.replace(asked, prefill_result=result)
    await engine.start_decode(decode).aresult()
    for call in engine.llm.calls_of("generate_async"):
        calls.keywords["generate_async"] |= set(call)


def pinned_names(version: str, called: str) -> set[str]:
    if called == "generate_async":
        return set(facts(version, "LLM", "methods")[called])
    made = PINS[version]["classes"]["LlmArgs" if called == "LLM" else called]
    return set(made.get("names") or made["fields"])


@pytest.mark.parametrize(
    ("called", "version"),
    [
        *((name, version) for name, version in NEWEST.items() if not name.endswith("Output")),
        ("LLM", "1.3.0rc29"),
        ("DisaggregatedParams", FIRST_SUPPORTED),
        ("DisaggregatedParams", AFTER_NEXT),
        ("generate_async", FIRST_SUPPORTED),
        ("SamplingParams", STABLE),
    ],
)
def test_every_keyword_given_to_tensorrt_llm_is_in_its_pins(
    keywords: dict[str, set[str]], called: str, version: str
) -> None:
    assert keywords[called]
    assert keywords[called] - pinned_names(version, called) == set()


@pytest.mark.parametrize(
    ("version", "missing"), [(OLD, {"priority", "trace_headers"}), (STABLE, {"priority"})]
)
def test_releases_of_1_2_lack_what_a_split_request_needs(
    keywords: dict[str, set[str]], version: str, missing: set[str]
) -> None:
    """Why they are refused by name."""
    assert keywords["generate_async"] - pinned_names(version, "generate_async") == missing
    lacking = keywords["DisaggregatedParams"] - pinned_names(version, "DisaggregatedParams")
    assert "disagg_request_id" in lacking


def test_the_next_release_has_every_key_of_a_transceiver_and_every_field_of_a_handoff() -> None:
    used = [
        yaml.safe_load(path.read_text()).get("cache_transceiver_config", {})
        for path in (ROOT / "engine_configs").glob("*/*.yaml")
    ]
    for version in (NEXT, AFTER_NEXT):
        keys = facts(version, "CacheTransceiverConfig")
        assert {key for each in used for key in each} <= set(keys)
        assert keys["transceiver_runtime"][1] == repr(default_runtime(version))
    older, newer = (facts(version, "DisaggregatedParams") for version in ("1.3.0rc29", AFTER_NEXT))
    assert older.items() <= newer.items()
    assert all(default == "None" for _, default in newer.values()), "a handoff without them is taken"


@pytest.mark.parametrize("version", [FIRST_SUPPORTED, NEWEST["DisaggregatedParams"], AFTER_NEXT])
def test_an_endpoint_is_one_string(version: str) -> None:
    assert facts(version, "DisaggregatedParams")["ctx_info_endpoint"] == ["Optional[str]", "None"]
    assert DisaggregatedParams(ctx_info_endpoint="tcp://a:1").ctx_info_endpoint == "tcp://a:1"


# -- scripts/pin_llm_api.py reads the API from a source tree


TOOL = ROOT / "scripts" / "pin_llm_api.py"

SOURCE = {
    "sampling_params.py": """
class GuidedDecodingParams:
    json: str | None = None
    _hidden: int = 3
    def _validate(self):
        raise ValueError("one")
""",
    "llmapi/llm_args.py": """
class LoadFormat(Enum):
    AUTO = 0
    DUMMY = 1
class WaitingQueuePolicy(StrEnum):
    FCFS = "fcfs"
CudaGraphConfigType: TypeAlias = Annotated[Union[A, B], Field(discriminator="mode")]
class BaseLlmArgs(Base):
    model: Union[str, Path] = Field(description="d")
    max_batch_size: Optional[int] = Field(default=2048, description="d", gt=0)
class TorchLlmArgs(BaseLlmArgs):
    config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    max_batch_size: int = Field(default=7, ge=1, le=9)
""",
    "llmapi/llm.py": """
class BaseLLM:
    def __init__(self, model: str, *, dtype: str = 'auto', **kwargs: Any): ...
    def _private(self, x): ...
    @property
    def tokenizer(self): ...
""",
    "executor/result.py": """
class GenerationResultBase:
    def __init__(self):
        self.id, self._done = 1, False
class GenerationResult(GenerationResultBase):
    async def aresult(self, timeout: float | None = None): ...
""",
    "llmapi/disagg_utils.py": "OTHER = 1",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tree = tmp_path_factory.mktemp("tree")
    for file, text in SOURCE.items():
        (tree / "tensorrt_llm" / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / "tensorrt_llm" / file).write_text(text)
    arguments = [tree, "--version", "9.9", "--source", "all=abc", "--out", tree]
    subprocess.run([sys.executable, TOOL, *map(str, arguments)], check=True, capture_output=True)
    read: dict[str, Any] = json.loads((tree / "9.9.json").read_text())
    return read


def test_the_program_reads_without_importing(made: dict[str, Any]) -> None:
    assert (made["version"], made["source"]) == ("9.9", {"all": "abc"})
    classes = made["classes"]
    assert classes["GuidedDecodingParams"]["fields"] == {"json": ["str | None", "None"]}
    assert classes["GuidedDecodingParams"]["raises"] == ["ValueError"]
    assert classes["LlmArgs"]["fields"] == {
        "model": ["Union[str, Path]", None],
        "max_batch_size": ["int", "7"],
        "config": ["KvCacheConfig", "KvCacheConfig()"],
    }
    assert classes["LlmArgs"]["limits"] == {"max_batch_size": {"ge": 1, "le": 9}}
    assert made["types"] == {
        "CudaGraphConfigType": "Union[A, B]",
        "LoadFormat": "Literal['AUTO', 'DUMMY', 0, 1]",
        "WaitingQueuePolicy": "Literal['fcfs']",
    }
    assert classes["LLM"]["methods"] == {
        "__init__": {"model": ["str", None], "dtype": ["str", "'auto'"], "**kwargs": ["Any", None]}
    }
    assert classes["LLM"]["attributes"] == ["tokenizer"]
    assert classes["RequestOutput"]["methods"]["aresult"] == {"timeout": ["float | None", "None"]}
    assert classes["RequestOutput"]["attributes"] == ["id"]
    assert made["functions"] == {"get_global_disagg_request_id": None}
    assert "DisaggregatedParams" not in classes, "the tree lacks it"


def test_a_folder_without_the_sources_is_refused(tmp_path: Path) -> None:
    arguments = [tmp_path, "--version", "9.9", "--source", "all=abc", "--out", tmp_path]
    done = subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode
    assert "has none of TensorRT-LLM's files" in done.stderr
    assert list(tmp_path.iterdir()) == []
