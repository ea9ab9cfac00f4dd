"""What `trtllm-disagg k8s` writes: valid for Kubernetes and Dynamo's operator, and the deployment that `up` starts."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import stat
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deployments import DEMO_CONFIGS, ROOT
from tests.support.kubernetes import Manifest, components, container, rendered
from trtllm_disagg import DYNAMO_VERSION, cli
from trtllm_disagg.config.args import add_worker_arguments, config_from_namespace, refuse_unknown_arguments
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import STRATEGIES, spec_of
from trtllm_disagg.tools.up.plan import plan
from trtllm_disagg.tools.up.up_command import add_arguments as add_up_arguments
from trtllm_disagg.tools.up.up_command import config_from

CRDS = {file.stem: json.loads(file.read_text()) for file in Path(__file__).parent.glob("crds/*.json")}
KUBERNETES = "1.37"
CONFIGS = ROOT / "engine_configs"
#: Every object and every field that can be written.
EVERYTHING = (
    *("--pod-monitor", "--namespace", "serving", "--cpu", "4", "--memory", "64Gi", "--shared-memory", "16Gi"),
    *("--model-claim", "weights", "--hf-token-secret", "hf-token-secret"),
)


def flags(strategy: str = "decode_first", **changes: str) -> Iterator[str]:
    given = {
        "strategy": strategy,
        "model": "/models/llama-3.1-8b",
        "image": "registry.example/trtllm-disagg:0.2.0",
        "engine-configs": str(CONFIGS / "llama-3.1-8b"),
        **changes,
    }
    for name, value in given.items():
        yield from (f"--{name}", value)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(b"k" * 32)
    return path


def problem_of(manifest: Manifest) -> str:
    """Empty for a valid one."""
    import jsonschema
    import kubernetes_validate

    def of_kubernetes(core: Manifest) -> None:
        kubernetes_validate.validate(core, KUBERNETES, strict=True)

    try:
        if manifest["kind"] in CRDS:
            pin = CRDS[manifest["kind"]]
            assert manifest["apiVersion"] == pin["apiVersion"]
            jsonschema.validate(manifest, pin["schema"])
        else:
            of_kubernetes(manifest)
        for component in manifest.get("spec", {}).get("components", []):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
            of_kubernetes(pod | {"spec": component["podTemplate"]["spec"]})
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        return str(error.message)
    return ""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_object_of_every_strategy_is_valid(strategy: str, key: Path) -> None:
    manifests = rendered(*flags(strategy), *EVERYTHING, "--admin-key-file", str(key))

    assert [problem_of(manifest) for manifest in manifests] == [""] * 4
    assert {each["metadata"]["namespace"] for each in manifests} == {"serving"}
    kinds = [each["kind"] for each in manifests]
    assert kinds == ["ConfigMap", "Secret", "DynamoGraphDeployment", "PodMonitor"]
    assert list(components(manifests)) == ["frontend", *spec_of(strategy).roles]


def test_fields_that_the_operator_does_not_know_are_invalid() -> None:
    (graph,) = rendered(*flags())[-1:]
    graph["spec"]["components"][1]["podtemplate"] = {}
    assert "podtemplate" in problem_of(graph)
    del graph["spec"]["components"][1]["podtemplate"]
    assert problem_of(graph) == ""
    container(graph["spec"]["components"][1])["ports"][0]["containerport"] = 1
    assert "containerport" in problem_of(graph)
    config_map = rendered(*flags())[0] | {"datas": {}}
    assert "datas" in problem_of(config_map)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_workers_have_the_flags_that_up_gives_them(strategy: str, tmp_path: Path) -> None:
    more: tuple[str, ...] = ("--engine", "tensorrt_llm", "--kv-block-size", "32", "--drain-seconds", "20")
    if spec_of(strategy).is_worker_side:
        more = (*more, "--next-router", "kv")
    more = (*more, "--worker-args=--max-seq-len 4096", "--frontend-args=--router-temperature 0.5")
    found = components(rendered(*flags(strategy), *more))

    parser = argparse.ArgumentParser()
    add_up_arguments(parser)
    same = flags(strategy, **{"served-model-name": "llama-3.1-8b"})
    of_up, _ = parser.parse_known_args([*same, *more])
    config = config_from(of_up, tmp_path)
    started = {spec.role: spec.argv for spec in plan(config, system_ports=itertools.count(1), environ={})}
    assert list(found) == list(started)
    for role, component in found.items():
        text = " ".join(container(component)["args"])
        of_this = " ".join(next(argv for name, argv in started.items() if name == role))
        assert text.replace("/etc/trtllm-disagg/engine-configs", str(CONFIGS / "llama-3.1-8b")) in of_this


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_containers_have_flags_that_their_programs_know(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = components(rendered(*flags(strategy), "--prefill-dispatch", "direct"))
    for role in spec_of(strategy).roles:
        spec = container(found[role])
        parser = argparse.ArgumentParser()
        add_worker_arguments(parser)
        namespace, unknown = parser.parse_known_args(spec["args"])
        refuse_unknown_arguments(parser, unknown)
        env = {each["name"]: each["value"] for each in spec["env"]}
        config = config_from_namespace(namespace, env | {"DYN_DISCOVERY_BACKEND": "kubernetes"})
        assert (config.role, config.discovery_backend) == (role, "kubernetes")
        assert strategy in (config.strategy, "agg")
        assert spec["command"] == ["python3", "-m", "trtllm_disagg", "worker"]

    from dynamo.frontend.main import parse_args

    monkeypatch.setattr(sys, "argv", ["frontend", *container(found["frontend"])["args"]])
    frontend, *_ = parse_args()
    assert (frontend.router_mode, frontend.event_plane) == ("kv", "zmq")


def test_every_file_that_a_container_names_is_mounted(key: Path) -> None:
    manifests = rendered(
        *flags("auto", **{"engine-configs": str(DEMO_CONFIGS), "engine": "embedded"}),
        *("--admin-key-file", str(key), "--transfer-key-file", str(key)),
    )
    objects = {each["metadata"]["name"]: each for each in manifests}
    for role in ("prefill", "decode"):
        component = components(manifests)[role]
        spec = container(component)
        mounts = {mount["name"]: mount["mountPath"] for mount in spec["volumeMounts"]}
        there = set()
        for volume in component["podTemplate"]["spec"]["volumes"]:
            source = volume.get("configMap", {}).get("name") or volume["secret"]["secretName"]
            there |= {f"{mounts[volume['name']]}/{file}" for file in objects[source]["data"]}
        words = [*spec["args"], *(each.get("value", "") for each in spec["env"])]
        named = {word for word in words if word.startswith("/etc/")}
        assert len(named) == 3
        assert named <= there


def test_config_map_has_engine_configs_unchanged(tmp_path: Path) -> None:
    (config_map,) = (each for each in rendered(*flags()) if each["kind"] == "ConfigMap")
    for role in ("prefill", "decode"):
        assert config_map["data"][f"{role}.yaml"] == (CONFIGS / "llama-3.1-8b" / f"{role}.yaml").read_text()


def test_another_engine_config_is_another_config_map(tmp_path: Path) -> None:
    for role in ("prefill", "decode"):
        text = (CONFIGS / "llama-3.1-8b" / f"{role}.yaml").read_text()
        (tmp_path / f"{role}.yaml").write_text(text.replace("max_batch_size: 16 ", "max_batch_size: 17 "))

    first, again, changed = (
        rendered(*flags(**{"engine-configs": str(folder)}))[0]["metadata"]["name"]
        for folder in (CONFIGS / "llama-3.1-8b", CONFIGS / "llama-3.1-8b", tmp_path)
    )
    assert first == again != changed


@pytest.mark.parametrize(
    ("configs", "more", "gpus"),
    [
        ("llama-3.1-8b", (), {"prefill": (1, "1"), "decode": (1, "1")}),
        ("llama-3.3-70b-fp8", (), {"prefill": (1, "2"), "decode": (1, "4")}),
        ("deepseek-r1", ("--gpus-per-node", "4"), {"prefill": (1, "4"), "decode": (8, "4")}),
        (
            "llama-3.1-8b",
            ("--worker-args=--pipeline-parallel-size 2",),
            {"prefill": (1, "2"), "decode": (1, "2")},
        ),
    ],
)
def test_pods_have_the_gpus_of_their_engine_config(
    configs: str, more: tuple[str, ...], gpus: dict[str, tuple[int, str]]
) -> None:
    found = components(rendered(*flags(**{"engine-configs": str(CONFIGS / configs)}), *more))
    for role, expected in gpus.items():
        nodes = found[role].get("multinode", {"nodeCount": 1})["nodeCount"]
        assert (nodes, container(found[role])["resources"]["limits"]["nvidia.com/gpu"]) == expected
    assert "resources" not in container(found["frontend"])


def test_workers_of_several_nodes_share_one_compute_domain() -> None:
    deepseek = {"engine-configs": str(CONFIGS / "deepseek-r1"), "gpus-per-node": "4"}
    manifests = rendered(*flags(**deepseek), "--compute-domain", "--namespace", "serving")
    assert [problem_of(manifest) for manifest in manifests] == [""] * 3
    (domain,) = (each for each in manifests if each["kind"] == "ComputeDomain")
    template = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    assert domain["metadata"]["namespace"] == "serving"
    found = components(manifests)
    for role in ("prefill", "decode"):
        (claim,) = found[role]["podTemplate"]["spec"]["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == template
        assert container(found[role])["resources"]["claims"] == [{"name": claim["name"]}]
        assert {"name": "NCCL_MNNVL_ENABLE", "value": "1"} in container(found[role])["env"]
    assert "resourceClaims" not in found["frontend"]["podTemplate"]["spec"]


def test_without_the_flag_there_is_no_compute_domain() -> None:
    manifests = rendered(*flags())
    assert not any(each["kind"] == "ComputeDomain" for each in manifests)
    assert "claims" not in container(components(manifests)["decode"])["resources"]


def test_embedded_engine_gets_no_gpus_and_the_pods_own_address(key: Path) -> None:
    demo = {"engine-configs": str(DEMO_CONFIGS), "engine": "embedded"}
    spec = container(components(rendered(*flags(**demo), "--transfer-key-file", str(key)))["prefill"])
    assert "resources" not in spec
    assert spec["args"][-1] == '{"embedded": {"transfer_host": "$(POD_IP)"}}'
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in spec["env"]


def test_probes_leave_time_to_load_and_to_answer() -> None:
    found = components(rendered(*flags(), "--startup-timeout", "1200"))
    spec = container(found["decode"])
    patience = {
        name: spec[name]["periodSeconds"] * spec[name]["failureThreshold"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert patience["startupProbe"] == 1200
    # Out of service long before it is restarted.
    assert patience["readinessProbe"] < patience["livenessProbe"]
    assert container(components(rendered(*flags()))["decode"])["startupProbe"]["failureThreshold"] == 360
    # What the probes ask crosses the engine.
    assert {"name": "DYN_HEALTH_CHECK_ENABLED", "value": "true"} in spec["env"]
    ports = {port["name"]: str(port["containerPort"]) for port in spec["ports"]}
    assert {spec[name]["httpGet"]["port"] for name in patience} == set(ports)
    assert {"name": "DYN_SYSTEM_PORT", "value": ports["system"]} in spec["env"]


@pytest.mark.parametrize(
    ("more", "least"),
    [
        (("--drain-seconds", "100"), 100 + 60),
        (("--worker-args=--drain-seconds 100",), 100 + 60),
        (("--worker-args=--drain-seconds 100 --engine-health-shutdown-timeout 200",), 100 + 200),
        (("--worker-args=--engine-health-shutdown-timeout 0",), 30 + 60),
    ],
)
def test_pod_is_killed_only_after_its_drain_and_its_engines_end(more: tuple[str, ...], least: int) -> None:
    found = components(rendered(*flags(), *more))
    seconds = {
        name: each["podTemplate"]["spec"]["terminationGracePeriodSeconds"] for name, each in found.items()
    }
    assert least <= seconds["decode"] == seconds["prefill"] <= least + 30


def test_replicas_are_those_of_the_flags() -> None:
    more = ("--prefill-workers", "3", "--decode-workers", "2", "--frontends", "4")
    found = components(rendered(*flags(), *more))
    assert {name: each["replicas"] for name, each in found.items()} == {
        "frontend": 4,
        "prefill": 3,
        "decode": 2,
    }


def test_output_is_a_file_for_each_object_and_the_same_as_stdout(tmp_path: Path, key: Path) -> None:
    out = tmp_path / "out"
    given = [*flags(), "--pod-monitor", "--admin-key-file", str(key)]
    assert cli.run(["k8s", *given, "--output", str(out)]) == 0

    files = {file.stem: file for file in out.iterdir()}
    assert set(files) == {"engine-configs", "admin-key", "deployment", "pod-monitor"}
    assert stat.S_IMODE(files["admin-key"].stat().st_mode) == 0o600
    written = [yaml.safe_load(file.read_text()) for file in files.values()]
    assert sorted(written, key=str) == sorted(rendered(*given), key=str)
    assert not any("&id" in file.read_text() for file in files.values())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"name": "No_Name"}, "--name: 'No_Name' is not allowed; expected up to 36 of a-z"),
        ({"namespace": "Serving"}, "--namespace: 'Serving'"),
        ({"image": "an image"}, "--image: 'an image'"),
        ({"memory": "64 GB"}, "--memory: '64 GB' is not allowed; expected a quantity"),
        ({"memory": "64ki"}, "--memory: '64ki' is not allowed; expected a quantity"),
        ({"memory": "8Gi", "shared-memory": "8192Mi"}, "--memory: '8Gi' .* more than --shared-memory 8192Mi"),
        ({"memory": "8G"}, "--memory: '8G' is not allowed; expected more than --shared-memory 8Gi"),
        ({"model": "./llama"}, "--model: './llama' is not allowed; expected a directory of the image"),
        ({"model": "org/name", "model-claim": "weights"}, "--model: 'org/name' .* a directory under /models"),
        ({"engine": "embedded", "compute-domain": ""}, "--compute-domain: 'embedded' is not allowed"),
        ({"engine": "auto"}, "--engine: 'auto' is not allowed; expected one of tensorrt_llm"),
        ({"engine-configs": "nowhere"}, "--engine-configs: 'nowhere'"),
        ({"kv-block-size": "33"}, "--kv-block-size: 33 is not allowed; expected a power of two"),
        ({"gpus-per-node": "0"}, "--gpus-per-node: 0"),
        ({"frontends": "0"}, "--frontends: 0"),
        ({"prefill-workers": "0"}, "--prefill-workers: 0"),
        ({"worker-args": "--max-seq-length 5"}, "unknown flag --max-seq-length; did you mean --max-seq-len"),
        ({"worker-args": "--max-seq-len many"}, "--max-seq-len: 'many'"),
        ({"worker-args": "--max-seq-len"}, "--max-seq-len"),
        ({"worker-args": "--extra-engine-args /models/tp4.yaml"}, "--extra-engine-args: '/models/tp4.yaml'"),
        ({"dynamo-version": "1.6"}, "--dynamo-version: '1.6'"),
        ({"transfer-key-file": "key"}, "--transfer-key-file: 'key' is not allowed; expected no value"),
        ({"admin-key-file": "nowhere"}, "--admin-key-file: 'nowhere'"),
        ({"engine": "embedded", "engine-configs": str(DEMO_CONFIGS)}, "--transfer-key-file is missing"),
        ({"startup-timeout": "0"}, "--startup-timeout"),
        ({"startup-timeout": "inf"}, "--startup-timeout: inf"),
        ({"startup-timeout": "1e30"}, r"--startup-timeout: 1e\+30"),
        ({"drain-seconds": "1e30"}, "--drain-seconds: .*from 0 to 1e9"),
    ],
)
def test_bad_input_is_refused_by_name_before_anything_is_written(
    given: dict[str, str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [f"--{name}={value}" if value else f"--{name}" for name, value in given.items()]
    with pytest.raises(ConfigError, match=named):
        cli.run(["k8s", *flags(), *words, "--output", str(out)])
    assert not out.exists()
    assert capsys.readouterr().out == ""


def test_output_that_cannot_be_written_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--output: '/proc/out' is not allowed; .*that can be written to"):
        cli.run(["k8s", *flags(), "--output", "/proc/out"])


def test_a_chat_template_that_only_the_pods_have_is_passed_on() -> None:
    found = components(rendered(*flags(), "--worker-args=--custom-jinja-template /models/chat.jinja"))
    assert container(found["decode"])["args"][-2:] == ["--custom-jinja-template", "/models/chat.jinja"]


def test_wrong_engine_config_is_refused_with_its_key(tmp_path: Path) -> None:
    for role in ("prefill", "decode"):
        (tmp_path / f"{role}.yaml").write_text(
            "tensor_parallel_sise: 2\ncache_transceiver_config: {backend: NIXL}\n"
        )
    with pytest.raises(ConfigError, match=r"tensor_parallel_sise.*did you mean tensor_parallel_size"):
        rendered(*flags(**{"engine-configs": str(tmp_path)}))


def test_worker_that_does_not_fill_its_nodes_is_refused() -> None:
    deepseek = {"engine-configs": str(CONFIGS / "deepseek-r1"), "gpus-per-node": "3"}
    with pytest.raises(ConfigError, match="--gpus-per-node: 3 is not allowed; expected a divisor of 4"):
        rendered(*flags(**deepseek))


@pytest.mark.parametrize("word", ['{"max_batch_size": 4}', "{a*}", "[1]", "a;b", "a&b", "a(b)"])
def test_argument_that_a_launcher_of_ranks_would_split_is_refused_over_several_nodes(word: str) -> None:
    deepseek = {"engine-configs": str(CONFIGS / "deepseek-r1")}
    override = f"--worker-args=--served-model-name '{word}'"
    with pytest.raises(ConfigError, match="trtllm-llmapi-launch splits its arguments again"):
        rendered(*flags(**deepseek), "--gpus-per-node", "4", override)
    rendered(*flags(), override)


def test_override_without_spaces_reaches_a_worker_of_several_nodes() -> None:
    deepseek = {"engine-configs": str(CONFIGS / "deepseek-r1"), "gpus-per-node": "4"}
    override = "--worker-args=--override-engine-args '{\"max_batch_size\":4}'"
    decode = container(components(rendered(*flags(**deepseek), override))["decode"])
    assert decode["args"][-1] == '{"max_batch_size":4}'
    assert {"name": "OMPI_ALLOW_RUN_AS_ROOT", "value": "1"} in decode["env"]


def test_override_beside_a_transfer_key_is_refused(key: Path) -> None:
    demo = {"engine-configs": str(DEMO_CONFIGS), "engine": "embedded", "transfer-key-file": str(key)}
    with pytest.raises(
        ConfigError, match=r"--worker-args: .*no --override-engine-args with --transfer-key-file"
    ):
        rendered(*flags(**demo), "--worker-args=--trtllm.max_batch_size 4")


def test_dynamo_version_is_the_one_that_is_installed_here() -> None:
    extras: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["dynamo"] == [f"ai-dynamo=={DYNAMO_VERSION}"]
    assert re.search(rf"^ai-dynamo=={DYNAMO_VERSION}$", (ROOT / "requirements/dynamo.txt").read_text(), re.M)
