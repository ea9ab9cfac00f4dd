"""deploy/k8s/ is valid for Kubernetes and Dynamo's operator, and starts workers as `up` does."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deployments import ROOT
from tests.support.kubernetes import Manifest, components, container, read, rendered
from trtllm_disagg import DYNAMO_VERSION
from trtllm_disagg.config.args import parse_worker_flags
from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.strategies import STRATEGIES, spec_of
from trtllm_disagg.tools.up.gpus import longest_sequence, num_ranks, shutdown_seconds
from trtllm_disagg.tools.up.plan import (
    BEYOND_DRAIN_SECONDS,
    BODY_LIMIT,
    GPU_STARTUP_SECONDS,
    TUNABLE_ENV,
    body_limit,
)

K8S = ROOT / "deploy" / "k8s"
CRDS = {file.stem: json.loads(file.read_text()) for file in Path(__file__).parent.glob("crds/*.json")}
KUBERNETES = "1.37"
DEEPSEEK = "deepseek-r1"
OVERLAYS = (*STRATEGIES, DEEPSEEK)
#: Where deploy/docker/Dockerfile puts engine_configs/.
IN_IMAGE = "/opt/trtllm-disagg/"


def problem_of(manifest: Manifest) -> str:
    """Empty for a valid one."""
    import jsonschema
    import kubernetes_validate

    pin = CRDS[manifest["kind"]]
    assert manifest["apiVersion"] == pin["apiVersion"]
    try:
        jsonschema.validate(manifest, pin["schema"])
        for component in manifest["spec"].get("components", []):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
            spec = component["podTemplate"]["spec"]
            kubernetes_validate.validate(pod | {"spec": spec}, KUBERNETES, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        return str(error.message)
    return ""


def workers_of(overlay: str) -> dict[str, Manifest]:
    found = components(rendered(K8S / overlay))
    del found["frontend"]
    return found


def read_worker(component: Manifest) -> WorkerConfig:
    """As the worker reads its flags and environment; its engine config is that of this tree."""
    spec = container(component)
    env = {each["name"]: each["value"] for each in spec["env"]} | {"DYN_DISCOVERY_BACKEND": "kubernetes"}
    flags = [word.replace(IN_IMAGE, f"{ROOT}/") for word in spec["args"]]
    return parse_worker_flags(flags, env, is_elsewhere=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_of_every_overlay_is_valid(overlay: str) -> None:
    made = rendered(K8S / overlay)
    assert [problem_of(manifest) for manifest in made] == [""] * len(made)
    strategy = "decode_first" if overlay == DEEPSEEK else overlay
    assert list(components(made)) == ["frontend", *spec_of(strategy).roles]


def test_pod_monitor_is_valid() -> None:
    (monitor,) = read(K8S / "pod-monitor.yaml")
    assert problem_of(monitor) == ""
    assert monitor["metadata"] == rendered(K8S / "agg")[0]["metadata"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_renders_what_is_tested_here(overlay: str) -> None:
    command = ["kubectl", "kustomize", str(K8S / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert sorted(yaml.safe_load_all(done.stdout), key=str) == sorted(rendered(K8S / overlay), key=str)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_workers_understand_their_flags_and_have_the_gpus_of_their_engine_config(overlay: str) -> None:
    for role, component in workers_of(overlay).items():
        config = read_worker(component)
        assert (config.role, config.engine, config.discovery_backend) == (role, "tensorrt_llm", "kubernetes")
        if overlay in STRATEGIES and overlay != "agg":
            assert config.strategy == overlay
        assert config.publish_kv_events
        assert config.tool_call_parser == ("deepseek_v3" if overlay == DEEPSEEK else "hermes")
        nodes = component.get("multinode", {"nodeCount": 1})["nodeCount"]
        gpus = int(container(component)["resources"]["limits"]["nvidia.com/gpu"])
        assert nodes * gpus == num_ranks(build_engine_args(config))


def test_frontend_has_flags_that_dynamo_knows_and_the_environment_of_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dynamo.frontend.main import parse_args

    spec = container(components(rendered(K8S / "auto"))["frontend"])
    monkeypatch.setattr(sys, "argv", ["frontend", *spec["args"]])
    frontend, *_ = parse_args()
    assert (frontend.router_mode, frontend.event_plane) == ("kv", "zmq")
    longest = longest_sequence(map(read_worker, workers_of("auto").values()))
    assert longest is not None
    for each in spec["env"]:
        of_up = {**TUNABLE_ENV, BODY_LIMIT: body_limit(longest), "HOME": "/tmp"}
        assert of_up[each["name"]] == each["value"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_update_starts_the_new_pod_first_and_lets_the_old_one_finish(overlay: str) -> None:
    manifest = next(each for each in rendered(K8S / overlay) if each["kind"] == "DynamoGraphDeployment")
    pace = {
        name.rpartition("-rolling-update-")[2]: each for name, each in manifest["spec"]["annotations"].items()
    }
    assert pace == {"max-surge": "1", "max-unavailable": "0"}
    frontend = components(rendered(K8S / overlay))["frontend"]
    sleep = container(frontend)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert 0 < sleep < frontend["podTemplate"]["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_time_to_load_and_to_drain(overlay: str) -> None:
    for component in workers_of(overlay).values():
        spec, config = container(component), read_worker(component)
        probes = ("startupProbe", "readinessProbe", "livenessProbe")
        patience = {name: spec[name]["periodSeconds"] * spec[name]["failureThreshold"] for name in probes}
        assert patience["startupProbe"] == GPU_STARTUP_SECONDS
        # Out of service long before it is restarted.
        assert patience["readinessProbe"] < patience["livenessProbe"]
        stop = config.drain_seconds + BEYOND_DRAIN_SECONDS + shutdown_seconds(config)
        assert component["podTemplate"]["spec"]["terminationGracePeriodSeconds"] == math.ceil(stop)
        (port,) = spec["ports"]
        assert {spec[name]["httpGet"]["port"] for name in probes} == {port["name"]}
        assert {"name": "DYN_SYSTEM_PORT", "value": str(port["containerPort"])} in spec["env"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_files_that_pods_name_are_mounted(overlay: str) -> None:
    for component in workers_of(overlay).values():
        key = read_worker(component).admin_key_file
        spec, volumes = container(component), component["podTemplate"]["spec"]["volumes"]
        (mount,) = spec["volumeMounts"]
        assert key == f"{mount['mountPath']}/key"
        assert [volume["name"] for volume in volumes] == [mount["name"]]


def test_workers_of_several_nodes_share_one_compute_domain_and_have_arguments_that_no_shell_splits() -> None:
    (domain,) = (each for each in rendered(K8S / DEEPSEEK) if each["kind"] == "ComputeDomain")
    template = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    for component in workers_of(DEEPSEEK).values():
        (claim,) = component["podTemplate"]["spec"]["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == template
        assert container(component)["resources"]["claims"] == [{"name": claim["name"]}]
        assert not re.search(r"[\s*?\[;&|<>()]", "".join(container(component)["args"]))


def test_dynamo_version_is_the_one_that_is_installed_here() -> None:
    extras: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["dynamo"] == [f"ai-dynamo=={DYNAMO_VERSION}"]
    assert re.search(rf"^ai-dynamo=={DYNAMO_VERSION}$", (ROOT / "requirements/dynamo.txt").read_text(), re.M)
    for component in components(rendered(K8S / "auto")).values():
        assert component["runtimeVersionOverride"] == DYNAMO_VERSION
