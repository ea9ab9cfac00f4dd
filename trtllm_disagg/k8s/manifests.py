"""Pods as manifests, in YAML: a DynamoGraphDeployment for Dynamo's operator, and the objects that it mounts.

The operator adds what it knows better: namespace, discovery, service account, the frontend's port and probes
(https://github.com/ai-dynamo/dynamo, deploy/operator).
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from trtllm_disagg.k8s.pods import (
    ADMIN_KEY,
    ENGINE_CONFIGS,
    KEY,
    MODELS,
    MOUNTED,
    SYSTEM_PORT,
    TRANSFER_KEY,
    Cluster,
    Pod,
    WorkerPod,
    frontend_pod,
    worker_pods,
)
from trtllm_disagg.tools.up.plan import DeploymentConfig

Manifest = dict[str, Any]
_COMPONENT_TYPES = {"agg": "worker"}
_PROBE_SECONDS = 10
#: 503 for so long takes a worker out of service, and 503 for so long restarts it. TensorRT-LLM's own detector of
#: hangs has 300 s.
_UNREADY_SECONDS, _HUNG_SECONDS = 30, 300
_SCRAPE_INTERVAL = "15s"
#: Of NVIDIA's DRA driver: the template that it makes of a ComputeDomain, and the claim of a pod.
_COMPUTE_DOMAIN, _CHANNEL = "compute-domain", "compute-domain-channel"


class _Dumper(yaml.SafeDumper):
    """Files stay readable inside a manifest, and nothing in it refers to another place."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text_of_lines(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text_of_lines)


def yaml_text(made: Manifest) -> str:
    return yaml.dump(made, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=200)


@dataclass(frozen=True, slots=True)
class _Mount:
    """A read-only volume of a pod. `source`: its type and settings."""

    name: str
    path: str
    source: Mapping[str, Any]


def manifests(config: DeploymentConfig, cluster: Cluster) -> dict[str, Manifest]:
    """File name -> manifest, with what others mount first. Raises ConfigError as `worker_pods` does."""
    workers = worker_pods(config, cluster)
    configs = {f"{pod.role}.yaml": pod.engine_config for pod in workers if pod.engine_config is not None}
    config_map = _name_of(cluster, configs)
    made: dict[str, Manifest] = {}
    if configs:
        made[ENGINE_CONFIGS] = _object(cluster, "v1", "ConfigMap", config_map) | {"data": configs}
    for name, key in _keys(cluster).items():
        data = {KEY: base64.b64encode(key).decode()}
        made[name] = _object(cluster, "v1", "Secret", f"{cluster.name}-{name}") | {"data": data}
    if cluster.has_compute_domain:
        made[_COMPUTE_DOMAIN] = _compute_domain(cluster)
    mounts = [*_models(cluster), *_configs(config_map if configs else None), *_secrets(cluster)]
    grace_seconds = math.ceil(config.stop_seconds)
    components = [
        _component(frontend_pod(config, cluster), cluster, list(_models(cluster)), grace_seconds, {}),
        *(_worker(pod, cluster, mounts) for pod in workers),
    ]
    spec = {"backendFramework": "trtllm", "components": components}
    graph = _object(cluster, "nvidia.com/v1beta1", "DynamoGraphDeployment", cluster.name)
    made["deployment"] = graph | {"spec": spec}
    if cluster.has_pod_monitor:
        made["pod-monitor"] = _pod_monitor(cluster)
    return made


def _object(cluster: Cluster, version: str, kind: str, name: str) -> Manifest:
    metadata = _present({"name": name, "namespace": cluster.namespace})
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _name_of(cluster: Cluster, configs: Mapping[str, str]) -> str:
    """The name contains a hash of the files, so that changed files restart the workers."""
    content = "\0".join(text for item in configs.items() for text in item)
    return f"{cluster.name}-{ENGINE_CONFIGS}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def _worker(pod: WorkerPod, cluster: Cluster, mounts: list[_Mount]) -> Manifest:
    resources = cluster.resources
    bounds = {"cpu": resources.cpu, "memory": resources.memory}
    gpus = str(pod.gpus) if pod.gpus else None
    container = {
        "ports": [{"name": "system", "containerPort": SYSTEM_PORT}],
        "resources": _present(
            {
                "requests": _present(bounds),
                # Only memory is limited: extra processor time takes nothing from other pods.
                "limits": _present({"memory": resources.memory, "nvidia.com/gpu": gpus}),
                "claims": [{"name": _CHANNEL}] if cluster.has_compute_domain else None,
            }
        ),
        # Dynamo answers /live like /health, with 503 while the worker loads.
        "startupProbe": _probe("/live", pod.startup_seconds),
        "readinessProbe": _probe("/health", _UNREADY_SECONDS),
        "livenessProbe": _probe("/live", _HUNG_SECONDS),
    }
    nodes = {"multinode": {"nodeCount": pod.nodes}} if pod.nodes > 1 else {}
    shared = {"sharedMemorySize": resources.shared_memory}
    component = _component(pod, cluster, mounts, math.ceil(pod.stop_seconds), container, nodes | shared)
    if cluster.has_compute_domain:
        claim = {"name": _CHANNEL, "resourceClaimTemplateName": _channel_template(cluster)}
        component["podTemplate"]["spec"]["resourceClaims"] = [claim]
    return component


def _component(
    pod: Pod,
    cluster: Cluster,
    mounts: list[_Mount],
    grace_seconds: int,
    container: Manifest,
    settings: Manifest | None = None,
) -> Manifest:
    main = {
        # The operator merges its settings into the container of this name.
        "name": "main",
        "image": cluster.image,
        "command": list(pod.command),
        "args": list(pod.args),
        "env": list(_env(pod)),
        "envFrom": [{"secretRef": {"name": cluster.hf_token_secret}}] if cluster.hf_token_secret else None,
        **container,
        "volumeMounts": [{"name": m.name, "mountPath": m.path, "readOnly": True} for m in mounts],
    }
    pod_spec = {
        "terminationGracePeriodSeconds": grace_seconds,
        "containers": [_present(main)],
        "volumes": [{"name": m.name, **m.source} for m in mounts],
    }
    return {
        "name": pod.role,
        "type": _COMPONENT_TYPES.get(pod.role, pod.role),
        "replicas": pod.replicas,
        # The image's tag is this project's own.
        "runtimeVersionOverride": cluster.dynamo_version,
        **(settings or {}),
        "podTemplate": {"spec": _present(pod_spec)},
    }


def _env(pod: Pod) -> Iterator[Manifest]:
    for name, value in pod.env.items():
        yield {"name": name, "value": value}
    if any("$(POD_IP)" in argument for argument in pod.args):
        yield {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def _probe(path: str, seconds: float) -> Manifest:
    """Fails when the answer is no success for so long."""
    return {
        "httpGet": {"path": path, "port": "system"},
        "periodSeconds": _PROBE_SECONDS,
        "timeoutSeconds": _PROBE_SECONDS // 2,
        "failureThreshold": math.ceil(seconds / _PROBE_SECONDS),
    }


def _models(cluster: Cluster) -> Iterator[_Mount]:
    """The frontend reads the tokenizer."""
    if cluster.model_claim is not None:
        claim = {"claimName": cluster.model_claim, "readOnly": True}
        yield _Mount("models", str(MODELS), {"persistentVolumeClaim": claim})


def _configs(config_map: str | None) -> Iterator[_Mount]:
    if config_map is not None:
        yield _Mount(ENGINE_CONFIGS, str(MOUNTED / ENGINE_CONFIGS), {"configMap": {"name": config_map}})


def _secrets(cluster: Cluster) -> Iterator[_Mount]:
    for name in _keys(cluster):
        # Root's, and readable for the pod's group, which the operator sets.
        secret = {"secretName": f"{cluster.name}-{name}", "defaultMode": 0o440}
        yield _Mount(name, str(MOUNTED / name), {"secret": secret})


def _keys(cluster: Cluster) -> dict[str, bytes]:
    keys = {ADMIN_KEY: cluster.admin_key, TRANSFER_KEY: cluster.transfer_key}
    return {name: key for name, key in keys.items() if key is not None}


def _compute_domain(cluster: Cluster) -> Manifest:
    """One for both roles, so that KV has NVLink too. Its number of nodes, which cannot be changed later, is none: pods
    do not wait for each other to start, and workers may be added.
    """
    template = {"resourceClaimTemplate": {"name": _channel_template(cluster)}}
    domain = _object(cluster, "resource.nvidia.com/v1beta1", "ComputeDomain", cluster.name)
    return domain | {"spec": {"numNodes": 0, "channel": template}}


def _channel_template(cluster: Cluster) -> str:
    return f"{cluster.name}-{_CHANNEL}"


def _pod_monitor(cluster: Cluster) -> Manifest:
    """The monitor of /metrics on workers' system port and the frontend's HTTP port. The operator sets the labels."""
    return _object(cluster, "monitoring.coreos.com/v1", "PodMonitor", cluster.name) | {
        "spec": {
            "selector": {"matchLabels": {"nvidia.com/dynamo-graph-deployment-name": cluster.name}},
            "podMetricsEndpoints": [
                {"port": port, "path": "/metrics", "interval": _SCRAPE_INTERVAL}
                for port in ("system", "http")
            ],
        }
    }


def _present(values: Manifest) -> Manifest:
    """A mapping without values that are None or empty."""
    return {name: value for name, value in values.items() if value not in (None, {}, [])}
