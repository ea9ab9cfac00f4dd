"""The engine arguments that Dynamo's own files for TensorRT-LLM set are taken as they are, by worker and doctor."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.pin_engine_arguments import engine_files
from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.doctor.pair import PlannedDeployment, side_of

#: Made by tools/pin_engine_arguments.py.
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
        assert side_of(Role.PREFILL, "engine.yaml", content, None, PlannedDeployment()).bad_keys == ()


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
    (bad,) = side_of(Role.DECODE, "engine.yaml", content, None, PlannedDeployment()).bad_keys
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
