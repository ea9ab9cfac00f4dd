"""The lives of real worker processes, as each of them describes itself at its system port."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import demo_model
from tests.support.dynamo_deployment import COMPLETIONS, DynamoDeployment
from tests.support.hard_worker import LOADS, NEVER_LOADS
from trtllm_disagg.admin.commands import CONTROL, Command, Flip, Leave, Set, Signer
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.dynamo_runtime.handler import DESCRIBE

pytestmark = pytest.mark.process

GRACE_SECONDS = 2.0
STEP_SECONDS = 0.1
#: Of the request that keeps a worker draining.
TOKENS = 150


class Deployment(DynamoDeployment):
    def start(self, **roles: str) -> None:
        """Workers by name, on engines that need STEP_SECONDS for a token."""
        key = self.directory / "key"
        if not key.exists():
            AdminKey.create(key)
        pace = json.dumps({"recording": {"step_seconds": STEP_SECONDS}})
        words = ["trtllm_disagg", "worker", "--engine", "recording", "--model", str(demo_model())]
        words += ["--served-model-name", "slow", "--admin-key-file", str(key), "--override-engine-args", pace]
        words += ["--drain-seconds", "60", "--disaggregation-strategy", "decode_first"]
        words += ["--disaggregation-mode"]
        self.start_workers({name: [*words, role] for name, role in roles.items()})

    def describe(self, worker: str) -> dict[str, Any]:
        return self.asks(worker, {})

    def is_in(self, worker: str, **description: Any) -> bool:
        """A worker between two role terms does not answer for a moment: its next runtime has no route yet."""
        with contextlib.suppress(OSError):
            status, content = self.post("/engine/trtllm_disagg", {}, self.system_ports[worker])
            return status == 200 and json.loads(content).items() >= description.items()
        return False

    def becomes(self, worker: str, **description: Any) -> None:
        self.wait_until(lambda: self.is_in(worker, **description), f"{worker} is {description}", 60.0)

    def commands(self, worker: str, command: Command) -> dict[str, Any]:
        signer = Signer(AdminKey.read(self.directory / "key", "key"))
        return self.asks(worker, signer.request(command, int(self.describe(worker)["instance"], 16)))


def body(tokens: int) -> dict[str, Any]:
    return {"model": "slow", "prompt": [5, 6, 7, 8], "max_tokens": tokens, "ignore_eos": True}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Deployment]:
    place = Deployment(tmp_path, grace_seconds=GRACE_SECONDS)
    yield place
    place.stop()


@contextlib.contextmanager
def answering(place: Deployment) -> Iterator[Future[tuple[int, bytes]]]:
    """A request that is answered in full, whatever the block does."""
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(place.post, COMPLETIONS, body(TOKENS))
        place.wait_until(lambda: place.describe("decode")["client_requests"] == 1, "it runs")
        yield asked
        status, content = asked.result()
        assert (status, json.loads(content)["usage"]["completion_tokens"]) == (200, TOKENS), content


def test_a_flip_of_the_only_first_stage_keeps_its_namespace_closed_for_no_longer_than_the_grace_period(
    place: Deployment,
) -> None:
    """And all the while the worker says where it is, and what it becomes."""
    place.start_frontend()
    place.start(prefill="prefill", decode="decode")
    place.wait_ready(body(1))
    place.becomes("decode", state="serving", becomes="", ready=True, role="decode")
    was = place.describe("decode")["instance"]
    with answering(place) as asked:
        assert place.commands("decode", Flip("prefill", force=True)) == {"answer": {"warnings": []}}
        refused = place.commands("decode", Flip("prefill", force=True))["error"]
        assert (refused["code"], "it is unlisted" in refused["message"]) == ("Leaving", True)
        place.becomes("decode", state="draining", becomes="prefill", ready=True, client_requests=1)
        place.start(successor="decode")
        place.wait_until(lambda: place.post(COMPLETIONS, body(1))[0] == 200, "another first stage serves")
        assert not asked.done(), "the last request of the old one still runs"
        assert place.is_in("decode", state="draining")
    place.becomes("decode", state="serving", becomes="", role="prefill")
    assert place.describe("decode")["flipped_from"] == was != place.describe("decode")["instance"]
    assert place.commands("decode", Set({"max_queued_requests": 7}))["answer"]["changed"]


def test_a_worker_describes_itself_while_it_loads_and_takes_no_command_then(
    place: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NEVER_LOADS, "1")
    AdminKey.create(key := place.directory / "key")
    words = ["tests.support.hard_worker", "--model", str(demo_model()), "--engine", "tensorrt_llm"]
    place.start_workers({"decode": [*words, "--admin-key-file", str(key)]})
    place.wait_until(lambda: LOADS in place.log("decode"), "it loads", 60.0)
    told = place.describe("decode")
    assert told == place.asks("decode", {DESCRIBE: True})
    now = {"state": "loading", "ready": False, "becomes": "", "role": "agg", "revision": None, "process": ""}
    assert told.items() >= now.items()
    assert told.keys() >= {"strategy", "instance"}
    assert place.commands("decode", Leave(1.0))["error"]["code"] == "Unavailable"
    assert "not signed" in place.asks("decode", {CONTROL: {}})["error"]["message"]
    for wrong in ({"tokens": 1}, {DESCRIBE: True, CONTROL: {}}):
        error = place.asks("decode", wrong)["error"]
        assert error["code"] == "InvalidRequest"
        assert f"expected {{}}, {{{DESCRIBE!r}: true}} or a signed command" in error["message"]
    place.send("decode", signal.SIGTERM)
    place.wait_until(lambda: place.exit_code("decode") is not None, "it has ended")
