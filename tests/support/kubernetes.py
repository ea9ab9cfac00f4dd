"""A cluster on one machine: the part of Kubernetes' API that Dynamo's discovery uses, and a kubelet that starts a
manifest's containers as processes, with the additions of Dynamo's operator.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.support.dynamo_deployment import die_with_parent
from trtllm_disagg.tools.up.plan import LOOPBACK

Manifest = dict[str, Any]

#: Mount point of deploy/k8s/.
MOUNTED = "/etc/trtllm-disagg"

SLICES, WORKERS = "endpointslices", "dynamoworkermetadatas"
_KINDS = {
    SLICES: ("discovery.k8s.io/v1", "EndpointSlice"),
    WORKERS: ("nvidia.com/v1alpha1", "DynamoWorkerMetadata"),
}
_WATCH_SECONDS = 60.0


def rendered(folder: Path) -> list[Manifest]:
    """The part of `kubectl kustomize` that deploy/k8s/ uses."""
    told = yaml.safe_load((folder / "kustomization.yaml").read_text())
    made: list[Manifest] = []
    for name in told["resources"]:
        path = folder / name
        made += rendered(path) if path.is_dir() else read(path)
    for patch in told.get("patches", ()):
        (target,) = (each for each in made if each["kind"] == patch["target"]["kind"])
        for step in yaml.safe_load(patch["patch"]):
            _patch(target, **step)
    return made


def read(file: Path) -> list[Manifest]:
    """Copies aliases, so that a patch changes one place."""
    loaded: list[Manifest] = json.loads(json.dumps(list(yaml.safe_load_all(file.read_text()))))
    return loaded


def _patch(target: Any, op: str, path: str, value: Any = None) -> None:
    *parents, last = (word.replace("~1", "/") for word in path.split("/")[1:])
    for word in parents:
        target = target[int(word)] if isinstance(target, list) else target[word]
    if last == "-":
        target.append(value)
        return
    key = int(last) if isinstance(target, list) else last
    assert (op == "add") != (isinstance(target, list) or key in target)
    if op == "remove":
        del target[key]
    else:
        target[key] = value
    return


def components(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Components by name."""
    (graph,) = (each for each in manifests if each["kind"] == "DynamoGraphDeployment")
    return {component["name"]: component for component in graph["spec"]["components"]}


def container(component: Manifest) -> Manifest:
    (only,) = component["podTemplate"]["spec"]["containers"]
    return dict(only)


class Cluster:
    """Lists and watches of two kinds, and server-side apply."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: (kind, resource version, event type, object), oldest first.
        self._events: list[tuple[str, int, str, Manifest]] = []
        self._objects: dict[tuple[str, str], Manifest] = {}
        self._closed = False
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                kind, query = url.path.rpartition("/")[2], parse_qs(url.query)
                if query.get("watch") == ["true"]:
                    self._watch(kind, int(query["resourceVersion"][0]))
                else:
                    self._answer(cluster.listed(kind))

            def do_PATCH(self) -> None:
                _, kind, name = urlsplit(self.path).path.rsplit("/", 2)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(cluster.apply(kind, name, json.loads(body)))

            def _answer(self, found: Manifest) -> None:
                body = json.dumps(found).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _watch(self, kind: str, since: int) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                with contextlib.suppress(OSError):
                    for event in cluster.events(kind, since):
                        line = json.dumps(event).encode() + b"\n"
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                        self.wfile.flush()
                    self.wfile.write(b"0\r\n\r\n")

            def log_message(self, format: str, *args: object) -> None:
                """Not into the tests' output."""

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_address[1]}"

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def listed(self, kind: str) -> Manifest:
        version, name = _KINDS[kind]
        with self._changed:
            items = [item for (of, _), item in self._objects.items() if of == kind]
            metadata = {"resourceVersion": str(len(self._events))}
        return {"apiVersion": version, "kind": f"{name}List", "metadata": metadata, "items": items}

    def apply(self, kind: str, name: str, made: Manifest) -> Manifest:
        version, of_kind = _KINDS[kind]
        with self._changed:
            number, is_new = len(self._events) + 1, (kind, name) not in self._objects
            metadata = {
                **made.get("metadata", {}),
                "name": name,
                "uid": name,
                "resourceVersion": str(number),
                "generation": number,
            }
            stored = {**made, "apiVersion": version, "kind": of_kind, "metadata": metadata}
            self._objects[kind, name] = stored
            self._events.append((kind, number, "ADDED" if is_new else "MODIFIED", stored))
            self._changed.notify_all()
        return stored

    def events(self, kind: str, since: int) -> Iterator[Manifest]:
        while True:
            with self._changed:
                new = [event for event in self._events[since:] if event[0] == kind]
                since = len(self._events)
                if not new and not self._changed.wait_for(
                    lambda: self._closed or len(self._events) > since,  # noqa: B023
                    _WATCH_SECONDS,
                ):
                    return
                if self._closed:
                    return
            for _, _, change, changed in new:
                yield {"type": change, "object": changed}

    def names(self, kind: str) -> set[str]:
        return {name for of, name in self._objects if of == kind}

    def now_ready(self, pod: str) -> None:
        """Put the ready pod into a slice, as the endpoint controller does; discovery requires it."""
        labels = {f"nvidia.com/dynamo-discovery-{name}": value for name, value in _DISCOVERY_LABELS.items()}
        endpoint = {
            "addresses": [LOOPBACK],
            "conditions": {"ready": True},
            "targetRef": {"kind": "Pod", "name": pod, "uid": pod},
        }
        slice_ = {"metadata": {"labels": labels}, "addressType": "IPv4", "endpoints": [endpoint], "ports": []}
        self.apply(SLICES, f"{pod}-slice", slice_)


_DISCOVERY_LABELS = {"backend": "kubernetes", "enabled": "true"}


@dataclass
class Pod:
    """One container as a process, probed as by a kubelet."""

    name: str
    spec: Manifest
    port: int
    env: Mapping[str, str]
    process: subprocess.Popen[bytes]
    log: Path

    def exec(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Like `kubectl exec`."""
        argv = [sys.executable, *command]
        return subprocess.run(
            argv, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=60
        )

    def url_of(self, probe: str) -> str:
        return f"http://{LOOPBACK}:{self.port}{self.spec[probe]['httpGet']['path']}"


class Kubelet:
    """Starts containers with their files below `root`. `secrets`: mounted ones."""

    def __init__(self, cluster: Cluster, secrets: Mapping[str, Mapping[str, bytes]], root: Path) -> None:
        self._secrets = secrets
        self._root = root
        self.pods: list[Pod] = []
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": cluster.url}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        (root / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))

    def start(self, component: Manifest, port: int, of_operator: Mapping[str, str]) -> Pod:
        spec = container(component)
        pod = f"{component['name']}-{sum(each.name.startswith(component['name']) for each in self.pods)}"
        self._mount(component["podTemplate"]["spec"].get("volumes", []), spec.get("volumeMounts", []))
        env = {
            **of_operator,
            **{each["name"]: self._in_root(each["value"]) for each in spec["env"]},
            "POD_NAME": pod,
            "POD_UID": pod,
            "KUBECONFIG": str(self._root / "kubeconfig"),
        }
        # All pods of a cluster have the same one.
        env |= {"DYN_SYSTEM_PORT": str(port)} if "DYN_SYSTEM_PORT" in env else {"DYN_HTTP_PORT": str(port)}
        log = self._root / f"{pod}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *spec["command"][1:], *spec["args"]],
                env={**os.environ, **env},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        assert spec["command"][0] == "python3"
        self.pods.append(Pod(pod, spec, port, env, process, log))
        return self.pods[-1]

    @contextlib.contextmanager
    def also_running(self, pod: Pod, *command: str) -> Iterator[None]:
        """Run a command in the pod until the block ends."""
        env = {
            **os.environ,
            **pod.env,
            "POD_NAME": "reader-0",
            "POD_UID": "reader-0",
            "DYN_SYSTEM_PORT": "-1",
        }
        with (self._root / "reader.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command], env=env, stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        try:
            yield
        finally:
            process.kill()
            process.wait()

    def close(self) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.process.kill()
            pod.process.wait()

    def _in_root(self, text: str) -> str:
        return text.replace(MOUNTED, f"{self._root}{MOUNTED}")

    def _mount(self, volumes: Sequence[Manifest], mounts: Sequence[Manifest]) -> None:
        paths = {mount["name"]: Path(self._in_root(mount["mountPath"])) for mount in mounts}
        for volume in volumes:
            path = paths[volume["name"]]
            path.mkdir(parents=True, exist_ok=True)
            for name, content in self._secrets[volume["secret"]["secretName"]].items():
                (path / name).write_bytes(content)
                (path / name).chmod(0o600)
