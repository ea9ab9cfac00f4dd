"""Engine arguments in files: those of Dynamo are taken as they are, by worker and doctor; ours fit their engines."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.pin_engine_arguments import engine_files
from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.trtllm_version import NEWEST_KNOWN
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs, check_marks, refuse_unsupported
from trtllm_disagg.engines.modelled.config import ModelledArgs
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.doctor.pair import settings_of, stage_of

#: Made by scripts/pin_engine_arguments.py.
PIN = json.loads((Path(__file__).parent / "dynamos_engine_arguments.json").read_text())
#: Another class than LLM takes it; `backend: pytorch` is what LLM is, and is left out.
NOT_SERVED = ("backend", "_autodeploy")
#: TensorRT-LLM has taken it away since.
GONE = ("moe_config.backend", "WIDEEP")
SERVED = [
    (key, value)
    for key, values in PIN["values"].items()
    for value in values
    if (key, value) not in (NOT_SERVED, GONE)
]


def put(content: dict[str, Any], key: str, value: Any) -> None:
    *way, name = key.split(".")
    for part in way:
        content = content.setdefault(part, {})
    content[name] = value


@pytest.fixture(scope="module")
def all_at_once() -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, values in PIN["values"].items():
        if values != [None]:
            put(content, key, values[0])
    return content


def worker(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    path.write_text(yaml.safe_dump(content))
    return build_engine_args(
        WorkerConfig(model="org/model", role=Role.AGG, engine="tensorrt_llm", extra_engine_args=str(path))
    )


@pytest.mark.parametrize("key", PIN["values"])
def test_every_value_reaches_the_engine_and_is_known_to_doctor(
    key: str, all_at_once: dict[str, Any], tmp_path: Path
) -> None:
    for value in (value for served, value in SERVED if served == key):
        content = copy.deepcopy(all_at_once)
        put(content, key, value)
        built: Any = {"backend": "pytorch"} | worker(tmp_path / "engine.yaml", content)
        for part in key.split("."):
            built = built[part]
        assert built == value
        assert stage_of(settings_of(Role.PREFILL, ()), "e.yaml", content, NEWEST_KNOWN, {}).bad_keys == ()


def test_engine_argument_of_dynamos_examples_that_is_not_served_is_refused(tmp_path: Path) -> None:
    key, value = NOT_SERVED
    assert value in PIN["values"][key]
    with pytest.raises(ConfigError, match="backend: '_autodeploy' is not allowed; expected 'pytorch'"):
        worker(tmp_path / "engine.yaml", {key: value})


def test_engine_argument_removed_by_tensorrt_llm_is_an_error_of_doctor() -> None:
    key, value = GONE
    assert value in PIN["values"][key]
    content: dict[str, Any] = {}
    put(content, key, value)
    (bad,) = stage_of(settings_of(Role.DECODE, ()), "e.yaml", content, NEWEST_KNOWN, {}).bad_keys
    assert (bad.key, bad.value) == GONE
    assert "'CUTEDSL'" in bad.instead


def test_files_are_found_by_their_arguments_also_in_config_maps(tmp_path: Path) -> None:
    engine = {"tensor_parallel_size": 2, "kv_cache_config": {"dtype": "fp8"}}
    documents = [
        {"kind": "ConfigMap", "data": {"prefill.yaml": yaml.safe_dump(engine), "run.sh": "exit"}},
        {"kind": "Deployment", "spec": engine},
    ]
    (tmp_path / "deploy.yaml").write_text(yaml.safe_dump_all(documents))
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(engine))
    (tmp_path / "template.yaml").write_text("{{ not yaml }")
    assert list(engine_files(tmp_path)) == [engine, engine]


# -- the files of engine_configs/ load, explain themselves, and fit their partners


FOLDER = Path(__file__).parents[3] / "engine_configs"
FILES = sorted(FOLDER.glob("*/*.yaml"))
MODELS = sorted(path.name for path in FOLDER.iterdir())


#: The others are TensorRT-LLM's.
ENGINES: dict[str, tuple[str, type[LlmArgs]]] = {
    "demo": ("embedded", LlmArgs),
    "modelled": ("modelled", ModelledArgs),
}


#: Served with --enable-multimodal, for which decode reuses no blocks.
WITH_IMAGES = ("qwen2.5-vl",)

#: In either role.
FLEX = "flex"


def load(path: Path, role: Role) -> dict[str, Any]:
    engine, _ = ENGINES.get(path.parent.name, ("tensorrt_llm", LlmArgs))
    return build_engine_args(
        WorkerConfig(model="org/model", role=role, engine=engine, extra_engine_args=str(path))
    )


def args_of(path: Path) -> LlmArgs:
    _, args = ENGINES.get(path.parent.name, ("tensorrt_llm", LlmArgs))
    roles = (Role.PREFILL, Role.DECODE) if path.stem == FLEX else (Role(path.stem),)
    one, *other = [args(**load(path, role)) for role in roles]
    assert other in ([], [one])
    return one


def short_name(path: Path) -> str:
    return str(path.relative_to(FOLDER))


def test_every_model_has_the_three_roles_and_a_worker_that_flips() -> None:
    for model in MODELS:
        roles = [path.stem for path in FILES if path.parent.name == model]
        assert roles == ["agg", "decode", FLEX, "prefill"]


@pytest.mark.parametrize("path", FILES, ids=short_name)
def test_every_key_of_an_engine_file_has_a_comment_and_is_known_to_its_engine(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert [line for line in lines if not line.startswith("#") and " # " not in line] == []
    args = args_of(path)
    if path.parent.name == "demo":
        assert refuse_unsupported(args) == []
    elif path.parent.name == "modelled":
        assert set(check_marks(args, "modelled")) <= {"disable_overlap_scheduler"}


@pytest.mark.parametrize("stages", [("prefill", "decode"), (FLEX, "decode"), ("prefill", FLEX), (FLEX, FLEX)])
@pytest.mark.parametrize("model", MODELS)
def test_the_two_sides_of_a_pair_fit(model: str, stages: tuple[str, str]) -> None:
    prefill, decode = (args_of(FOLDER / model / f"{name}.yaml") for name in stages)
    assert prefill.max_seq_len == decode.max_seq_len
    assert prefill.dtype == decode.dtype
    alike = FLEX not in stages and model not in WITH_IMAGES
    for name in ("tokens_per_block", "dtype", *(["enable_block_reuse"] if alike else [])):
        assert getattr(prefill.kv_cache_config, name) == getattr(decode.kv_cache_config, name)
    assert prefill.cache_transceiver_config == decode.cache_transceiver_config
    for stage in (prefill, decode):
        assert stage.cache_transceiver_config is not None
        runtime = stage.cache_transceiver_config.transceiver_runtime
        expected = {"NIXL": "PYTHON", "UCX": "CPP"}[str(stage.cache_transceiver_config.backend)]
        assert runtime == ("auto" if model in ENGINES else expected), "of TensorRT-LLM's: named"
        assert (stage.kv_cache_config.use_kv_cache_manager_v2 is False) == (runtime == "CPP")
        assert stage.enable_chunked_prefill
        assert stage.max_seq_len is not None
        buffer = stage.cache_transceiver_config.max_tokens_in_buffer
        assert buffer is None or buffer >= stage.max_seq_len
    assert prefill.disable_overlap_scheduler is (stages[0] != FLEX and model != "demo")


@pytest.mark.parametrize("model", MODELS)
def test_a_worker_that_flips_prefills_as_prefill_does_and_decodes_as_decode_does(model: str) -> None:
    flex, prefill, decode = (args_of(FOLDER / model / f"{name}.yaml") for name in (FLEX, "prefill", "decode"))
    assert flex.max_num_tokens == prefill.max_num_tokens
    slots, graphs = flex.max_batch_size, flex.cuda_graph_config
    if model != "deepseek-r1":  # its flex workers have fewer ranks than decode
        assert (slots, graphs and graphs.enable_padding) == (
            decode.max_batch_size,
            decode.cuda_graph_config and decode.cuda_graph_config.enable_padding,
        )
        assert flex.tensor_parallel_size == decode.tensor_parallel_size
    assert graphs is not None
    assert model in ENGINES or graphs.max_batch_size == slots
    assert flex.kv_cache_config.enable_block_reuse is (model not in WITH_IMAGES)


@pytest.mark.parametrize("name", ["agg", "prefill", "decode", FLEX])
@pytest.mark.parametrize("model", WITH_IMAGES)
def test_files_for_models_with_images_serve_images(model: str, name: str) -> None:
    file, role = FOLDER / model / f"{name}.yaml", Role.DECODE if name == FLEX else Role(name)
    options = {"enable_multimodal": True, "extra_engine_args": str(file)}
    build_engine_args(WorkerConfig(model="org/model", role=role, engine="tensorrt_llm", **options))  # type: ignore[arg-type]
