"""`trtllm-disagg k8s`: the deployment that `up` would run here, as manifests for Dynamo's operator."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from trtllm_disagg import DYNAMO_VERSION, __version__
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.config.settings import POSITIVE, Allowed
from trtllm_disagg.engine.engines import ENGINES
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.exit_codes import ExitCode
from trtllm_disagg.k8s.pods import MODELS, MOUNTED, Cluster, Resources
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.up.plan import DeploymentConfig
from trtllm_disagg.tools.up.up_command import add_deployment_arguments, config_from


def _matching(pattern: str, in_words: str) -> Allowed:
    return Allowed(in_words, lambda value: re.fullmatch(pattern, value) is not None)


_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_OBJECT = _matching(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*", "the name of an object of the cluster")
_QUANTITY = _matching(r"[0-9]+(\.[0-9]+)?(m|k|Ki|[MGTPE]i?)?", "a quantity, as in 64Gi or 0.5")
_ALLOWED: Mapping[str, Allowed] = {
    # The operator appends the component's name.
    "name": _matching(rf"(?=.{{1,36}}$)[a-z]{_LABEL}|[a-z]", "up to 36 of a-z, 0-9 and -, from a letter"),
    "namespace": _matching(rf"(?=.{{1,63}}$){_LABEL}", "up to 63 of a-z, 0-9 and -"),
    "image": _matching(r"[^\s]+", "the reference of an image"),
    "frontends": POSITIVE,
    "gpus_per_node": POSITIVE,
    "cpu": _QUANTITY,
    "memory": _QUANTITY,
    "shared_memory": _QUANTITY,
    "model_claim": _OBJECT,
    "hf_token_secret": _OBJECT,
    "dynamo_version": _matching(r"(0|[1-9]\d{0,3})(\.(0|[1-9]\d{0,3})){2}", "a version as in 1.6.1"),
}
#: Of the flags above, where `config_from` knows another setting by the name.
_NAMESPACE = "kube_namespace"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_deployment_arguments(parser)
    group = parser.add_argument_group("on Kubernetes")
    add = group.add_argument
    add(
        "--image",
        required=True,
        help="has this project and ai-dynamo, and TensorRT-LLM unless --engine embedded",
    )
    add("--name", default="trtllm-disagg", help="of the DynamoGraphDeployment (default: %(default)s)")
    add("--namespace", dest=_NAMESPACE, help="of Kubernetes (default: kubectl's)")
    add("--output", type=Path, metavar="DIR", help="a file for each object (default: all to stdout)")
    add(
        "--frontends",
        type=int,
        default=1,
        metavar="N",
        help="replicas of the frontend (default: %(default)s)",
    )
    add("--model-claim", metavar="PVC", help=f"volume claim with the weights, mounted at {MODELS}")
    add("--hf-token-secret", metavar="SECRET", help="in the cluster, with HF_TOKEN")
    add(
        "--gpus-per-node",
        type=int,
        default=8,
        metavar="N",
        help="a larger worker has several nodes (default: %(default)s)",
    )
    add("--cpu", metavar="QUANTITY", help="asked for by each worker")
    add("--memory", metavar="QUANTITY", help="of each worker, /dev/shm included")
    add(
        "--shared-memory",
        default="8Gi",
        metavar="QUANTITY",
        help="/dev/shm of each worker (default: %(default)s)",
    )
    add("--admin-key-file", type=Path, metavar="FILE", help="key of `switch` and `set`; becomes a secret")
    add(
        "--transfer-key-file",
        type=Path,
        metavar="FILE",
        help="key of KV between pods of --engine embedded; becomes a secret",
    )
    add(
        "--compute-domain",
        action="store_true",
        help="NVLink between nodes, as GB200 has it: a ComputeDomain, and a claim on it in each worker's pods",
    )
    add(
        "--pod-monitor",
        action="store_true",
        help="where the Dynamo platform was installed without PodMonitors",
    )
    add("--dynamo-version", default=DYNAMO_VERSION, help="of ai-dynamo in the image (default: %(default)s)")


def run(args: argparse.Namespace) -> ExitCode:
    """Raises ConfigError before any file is written."""
    from trtllm_disagg.k8s.manifests import manifests, yaml_text

    config, cluster = _deployment(args), _cluster(args)
    has_pairs = spec_of(config.strategy).is_disaggregated
    if config.engine == "embedded" and has_pairs and cluster.transfer_key is None:
        raise ConfigError(
            "--transfer-key-file is missing: without a key, KV does not leave a pod of --engine embedded"
        )
    files = {name: yaml_text(made) for name, made in manifests(config, cluster).items()}
    header = f"# Made by trtllm-disagg {__version__} k8s: {config.strategy}, {config.model}.\n"
    if args.output is None:
        sys.stdout.write(header + "---\n".join(files.values()))
        return ExitCode.DONE
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            _write(args.output / f"{name}.yaml", header + text)
    except OSError as error:
        allowed = f"a directory that can be written to ({error.strerror})"
        raise ConfigError.bad_value("--output", str(args.output), allowed) from None
    return ExitCode.DONE


def _deployment(args: argparse.Namespace) -> DeploymentConfig:
    """The deployment as `up` has it. Without --engine it is the one that has GPUs."""
    if not _is_of_pods(args.model):
        allowed = "a directory of the image or a volume, from /, or a name on the Hugging Face hub"
        raise ConfigError.bad_value("--model", args.model, allowed)
    if args.model_claim is not None and MODELS not in PurePosixPath(args.model).parents:
        raise ConfigError.bad_value("--model", args.model, f"a directory under {MODELS}, with --model-claim")
    if args.engine not in (None, *ENGINES):
        raise ConfigError.bad_value("--engine", args.engine, f"one of {', '.join(ENGINES)}")
    name = args.served_model_name or PurePosixPath(args.model).name
    if not args.model.startswith("/"):
        name = args.served_model_name or args.model
    config = config_from(args, MOUNTED)
    return replace(config, served_model_name=name, engine=args.engine or "tensorrt_llm")


def _is_of_pods(model: str) -> bool:
    is_name = model.count("/") <= 1 and not model.startswith((".", "~"))
    return model.startswith("/") or is_name


def _cluster(args: argparse.Namespace) -> Cluster:
    for name, allowed in _ALLOWED.items():
        value = getattr(args, _NAMESPACE if name == "namespace" else name)
        if value is not None and not allowed.accepts(value):
            raise ConfigError.bad_value("--" + name.replace("_", "-"), value, allowed.in_words)
    if args.transfer_key_file is not None and args.engine != "embedded":
        none = "no value: --engine tensorrt_llm moves KV by its own transports"
        raise ConfigError.bad_value("--transfer-key-file", str(args.transfer_key_file), none)
    if args.compute_domain and args.engine not in (None, "tensorrt_llm"):
        raise ConfigError.bad_value(
            "--compute-domain", args.engine, "an engine with GPUs: --engine tensorrt_llm"
        )
    if args.memory is not None and _number_of(args.shared_memory) >= _number_of(args.memory):
        more = f"more than --shared-memory {args.shared_memory}, which is a part of it"
        raise ConfigError.bad_value("--memory", args.memory, more)
    if args.output is not None and args.output.exists() and not args.output.is_dir():
        raise ConfigError.bad_value("--output", str(args.output), "a directory, or one that can be made")
    return Cluster(
        name=args.name,
        namespace=getattr(args, _NAMESPACE),
        image=args.image,
        dynamo_version=args.dynamo_version,
        frontends=args.frontends,
        resources=Resources(args.cpu, args.memory, args.shared_memory, args.gpus_per_node),
        model_claim=args.model_claim,
        hf_token_secret=args.hf_token_secret,
        admin_key=_key(args.admin_key_file, lambda path: AdminKey.read(path, "--admin-key-file")),
        transfer_key=_key(args.transfer_key_file, lambda path: AdminKey.read(path, "--transfer-key-file")),
        has_compute_domain=args.compute_domain,
        has_pod_monitor=args.pod_monitor,
    )


def _number_of(quantity: str) -> float:
    """Of Kubernetes: 2Gi is 2 * 1024**3, 2G is 2 * 1000**3, 2m is 0.002."""
    number, prefix, is_binary = re.findall(r"([0-9.]+)(\D?)(i?)", quantity)[0]
    if prefix == "m":
        return float(number) / 1000
    step = 1024.0 if is_binary else 1000.0
    return float(number) * step ** " KMGTPE".index(prefix.upper() or " ")


def _key(path: Path | None, check: Callable[[Path], Any]) -> bytes | None:
    """To the byte, once a worker would take it."""
    if path is None:
        return None
    check(path)
    return path.read_bytes()


def _write(path: Path, text: str) -> None:
    """Write the manifests, which contain secrets, to a file for this user only."""
    path.unlink(missing_ok=True)
    path.touch(0o600)
    path.write_text(text, encoding="utf-8")
