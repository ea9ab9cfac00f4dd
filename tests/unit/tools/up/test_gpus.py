"""The GPUs of each worker of a deployment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.gpus import NO_GPUS, Gpus, gpus_of, longest_sequence, present_gpus, worker_configs
from trtllm_disagg.tools.up.plan import (
    BEYOND_DRAIN_SECONDS,
    GPU_STARTUP_SECONDS,
    STARTUP_SECONDS,
    DeploymentConfig,
    plan,
    same_again,
    worker_arguments,
)

DEVICES = "CUDA_VISIBLE_DEVICES"
EIGHT = ",".join(map(str, range(8)))


def config_of(tmp_path: Path, **changes: Any) -> DeploymentConfig:
    return DeploymentConfig("prefill_first", "toy/llama", "toy", tmp_path / "run", **changes)


def yaml(path: Path, tp: int = 1, fraction: float = 0.85, pp: int = 1) -> Path:
    path.write_text(
        f"tensor_parallel_size: {tp}\npipeline_parallel_size: {pp}\n"
        f"kv_cache_config: {{free_gpu_memory_fraction: {fraction}}}\n"
        "cache_transceiver_config: {backend: DEFAULT}\n"
    )
    return path


def deployment(
    tmp_path: Path, prefill: dict[str, Any], decode: dict[str, Any], **changes: Any
) -> DeploymentConfig:
    files = {
        role: yaml(tmp_path / f"{role}.yaml", **sizes)
        for role, sizes in (("prefill", prefill), ("decode", decode))
    }
    return config_of(tmp_path, engine="tensorrt_llm", engine_configs=files, **changes)


def gpus(
    config: DeploymentConfig, environ: dict[str, str] | None = None, present: tuple[str, ...] = ()
) -> Gpus:
    machine = {index: f"GPU-{index}f" for index in present}
    workers = dict(worker_configs(worker_arguments(config), environ or {}))
    return gpus_of(workers, config.gpu_devices, environ or {}, lambda: machine)


def planned(config: DeploymentConfig, **kwargs: Any) -> dict[str, str | None]:
    config = replace(config, gpus=gpus(config, **kwargs))
    specs = plan(config, system_ports=range(20000, 20020), environ={})
    return {spec.name: spec.env.get(DEVICES) for spec in specs if spec.role != "frontend"}


def test_each_worker_gets_the_number_of_gpus_of_its_engine_config(tmp_path: Path) -> None:
    config = deployment(
        tmp_path, {"tp": 2}, {"tp": 1, "pp": 2}, prefill_workers=2, decode_workers=2, gpu_devices=EIGHT
    )
    assert planned(config) == {"prefill-0": "0,1", "prefill-1": "2,3", "decode-0": "6,7", "decode-1": "4,5"}


def test_without_a_list_the_roles_variables_then_cudas_then_the_machine_decide(tmp_path: Path) -> None:
    config = deployment(tmp_path, {}, {})
    assert planned(config, present=("0", "1", "2")) == {"prefill-0": "0", "decode-0": "2"}
    assert planned(config, environ={DEVICES: "4,5"}, present=tuple("456")) == {
        "prefill-0": "4",
        "decode-0": "5",
    }
    of_roles = {DEVICES: "4,5", "PREFILL_" + DEVICES: "1,2", "DECODE_" + DEVICES: "3"}
    assert planned(config, environ=of_roles) == {"prefill-0": "1", "decode-0": "3"}
    by_flag = replace(config, gpu_devices="6,7")
    assert planned(by_flag, environ=of_roles) == {"prefill-0": "6", "decode-0": "7"}
    none = {"prefill-0": None, "decode-0": None}
    assert planned(config, environ={DEVICES: ""}, present=("0", "1")) == planned(config) == none
    shared = deployment(tmp_path, {"fraction": 0.4}, {"fraction": 0.45}, gpu_devices="0")
    assert planned(shared) == {"prefill-0": "0", "decode-0": "0"}


@pytest.mark.parametrize(
    ("exported", "prefill", "decode"),
    [
        (EIGHT, "0", "7"),
        ("2,3,-1,5", "2", "3"),
        ("GPU-2f,GPU-3", "GPU-2f", "GPU-3"),
        ("MIG-1b,MIG-2b", "MIG-1b", "MIG-2b"),
    ],
    ids=["a node", "up to -1", "UUIDs", "parts"],
)
def test_each_worker_gets_its_share_of_the_gpus_that_are_exported(
    exported: str, prefill: str, decode: str, tmp_path: Path
) -> None:
    shares = planned(deployment(tmp_path, {}, {}), environ={DEVICES: exported}, present=tuple(EIGHT[::2]))
    assert shares == {"prefill-0": prefill, "decode-0": decode}


@pytest.mark.parametrize("exported", ["0,8", "GPU-9f", "GPU-", "0,GPU-0f"])
def test_an_exported_gpu_that_is_missing_unclear_or_there_twice_is_refused(
    exported: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{DEVICES}: '{exported}' is not allowed; expected .*GPUs"):
        planned(deployment(tmp_path, {}, {}), environ={DEVICES: exported}, present=tuple(EIGHT[::2]))


@pytest.mark.parametrize(
    ("prefill", "decode", "devices", "words"),
    [
        ({}, {}, "0", "--gpus: '0' .*one more decode worker.*0.85 of GPU 0.*other workers have 0.85"),
        ({"tp": 4}, {}, "0,1", "--gpus: '0,1' is not allowed; .*at least 4: each prefill worker"),
        ({}, {}, "0,0", "--gpus: '0,0' is not allowed; .*different GPUs"),
        ({}, {}, "0,,1", "--gpus: '0,,1' is not allowed"),
    ],
    ids=["memory", "too few", "twice", "a gap"],
)
def test_gpus_that_do_not_suffice_are_refused_by_name(
    prefill: dict[str, Any], decode: dict[str, Any], devices: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(deployment(tmp_path, prefill, decode, gpu_devices=devices))


def test_the_embedded_engine_gets_none_and_refuses_a_list(tmp_path: Path) -> None:
    config = config_of(tmp_path, engine="embedded")
    assert gpus(config, environ={DEVICES: "0,1"}) == NO_GPUS
    with pytest.raises(ConfigError, match=r"--gpus: '0' is not allowed.*--engine tensorrt_llm"):
        gpus(replace(config, gpu_devices="0"))


def test_a_worker_that_is_started_again_has_its_own_gpus(tmp_path: Path) -> None:
    config = deployment(tmp_path, {}, {}, gpu_devices="0,1,2", prefill_workers=2)
    config = replace(config, gpus=gpus(config))
    specs = {spec.name: spec for spec in plan(config, system_ports=range(20000, 20020), environ={})}
    assert same_again(specs["prefill-1"], config, {}, specs.values()).env[DEVICES] == "1"


def test_a_worker_that_comes_later_gets_the_gpus_of_one_that_left(tmp_path: Path) -> None:
    config = deployment(tmp_path, {"tp": 2}, {"tp": 2}, gpu_devices=EIGHT)
    there = gpus(config)
    taken: list[tuple[str, dict[str, str]]] = [("prefill", {DEVICES: "2,3"}), ("decode", {DEVICES: "6,7"})]
    assert there.environment("prefill", taken) == {DEVICES: "0,1"}
    assert there.environment("decode", taken) == {DEVICES: "4,5"}


def test_with_gpus_a_deployment_has_more_time_to_load_and_to_end_its_engines(tmp_path: Path) -> None:
    config = deployment(tmp_path, {}, {}, gpu_devices="0,1", drain_seconds=20.0)
    on_gpus = replace(config, gpus=gpus(config))
    assert (config.startup_seconds, on_gpus.startup_seconds) == (STARTUP_SECONDS, GPU_STARTUP_SECONDS)
    assert replace(on_gpus, startup_timeout=7.0).startup_seconds == 7
    assert config.stop_seconds == 20 + BEYOND_DRAIN_SECONDS
    assert on_gpus.stop_seconds == 20 + BEYOND_DRAIN_SECONDS + 60
    assert on_gpus.beyond_drain_seconds == BEYOND_DRAIN_SECONDS + 60
    longer = replace(config, worker_args=("--engine-health-shutdown-timeout", "90"))
    assert replace(longer, gpus=gpus(longer)).stop_seconds == 20 + BEYOND_DRAIN_SECONDS + 90


@pytest.mark.parametrize(
    "smi",
    ["printf '0, GPU-a1\\n1, GPU-b2\\n'", "echo No devices were found; exit 6", "exit 9", None],
    ids=["as nvidia-smi says", "no devices", "no driver", "no nvidia-smi"],
)
def test_nvidia_smi_and_the_drivers_directory_tell_the_same_gpus(
    smi: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, uuid in (("0000:02:00.0", "GPU-b2"), ("0000:01:00.0", "GPU-a1")):
        (tmp_path / "driver" / name).mkdir(parents=True)
        (tmp_path / "driver" / name / "information").write_text(f"Model: \t A\nGPU UUID: \t {uuid}\n")
    if smi is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
        (tmp_path / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("trtllm_disagg.tools.up.gpus._DRIVER", tmp_path / "driver")
    assert present_gpus() == {"0": "GPU-a1", "1": "GPU-b2"}


@pytest.mark.parametrize(("given", "longest"), [({"decode": 4096}, 4096), ({}, None)])
def test_the_longest_sequence_is_that_of_the_worker_with_the_longest(
    tmp_path: Path, given: dict[str, int], longest: int | None
) -> None:
    arguments = worker_arguments(config_of(tmp_path, worker_args=("--max-seq-len", "99") if given else ()))
    for role, length in given.items():
        arguments[role] += ("--max-seq-len", str(length))
    configs = [config for _, config in worker_configs(arguments, {})]
    assert len(configs) == 2
    assert longest_sequence(configs) == longest
