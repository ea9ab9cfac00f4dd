"""Real worker processes on a TensorRT-LLM with hard edges: attention DP, broken transfers, dead workers and engines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.support.dynamo_deployment import COMPLETIONS, DynamoDeployment
from tests.support.hard_worker import KV_DIRECTORY, STANDS_STILL, KvFiles, held_in
from trtllm_disagg.handlers.trace import REQUEST_TRACE_PREFIX
from trtllm_disagg.tools.up.plan import LOOPBACK

pytestmark = pytest.mark.process

ENGINE_ARGS = {
    "cache_transceiver_config": {"backend": "NIXL"},
    "enable_attention_dp": True,
    "tensor_parallel_size": 2,
}


STALL_SECONDS = 5


class Pair:
    def __init__(self, directory: Path, model: Path, kv: Path) -> None:
        self.place = DynamoDeployment(directory)
        self.kv = kv
        self._worker = ["tests.support.hard_worker", "--model", str(model), "--served-model-name", "hard"]
        self._worker += ["--engine", "tensorrt_llm", "--override-engine-args", json.dumps(ENGINE_ARGS)]
        self._worker += ["--engine-stall-timeout", f"{STALL_SECONDS}"]
        self._worker += ["--disaggregation-strategy", "decode_first", "--disaggregation-mode"]

    def start(self) -> None:
        self.place.start_frontend()
        self.start_workers(prefill="prefill", decode="decode")
        self.place.wait_ready(self.body())

    def start_workers(self, **roles: str) -> None:
        """By name, and until they are ready."""
        commands = {name: [*self._worker, role] for name, role in roles.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KV_DIRECTORY, str(self.kv))
            self.place.start_workers(commands)
        ready = "worker ready"
        self.place.wait_until(lambda: all(ready in self.place.log(name) for name in roles), ready, 120)

    def body(self, **more: Any) -> dict[str, Any]:
        asked = {"model": "hard", "prompt": "which worker answers?", "max_tokens": 6, "ignore_eos": True}
        return asked | {"nvext": {"extra_fields": ["engine_data", "completion_token_ids"]}} | more

    def ask(self) -> tuple[list[int], dict[str, Any]]:
        """The tokens, and what was done for them."""
        extra = self.place.post_ok(COMPLETIONS, self.body())["nvext"]
        return extra["completion_token_ids"], extra["engine_data"]["disagg"]

    def doctor(self) -> dict[str, tuple[str, str]]:
        """Rule -> (verdict, value), as `doctor --url` sees the deployment."""
        url = f"http://{LOOPBACK}:{self.place.http_port}"
        command = [sys.executable, "-m", "trtllm_disagg", "doctor", "--url", url, "--json"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.stdout, ended.stderr
        said = json.loads(ended.stdout)
        assert ended.returncode == (1 if said["errors"] else 0)
        return {row["rule"]: (row["verdict"], row["value"]) for row in said["rows"]}

    def num_served(self, worker: str) -> int:
        return self.place.log(worker).count(REQUEST_TRACE_PREFIX)

    def nothing_is_held(self, seconds: float = 15.0) -> None:
        self.place.wait_until(lambda: held_in(self.kv) == 0, "no context waits for a decode", seconds)


@pytest.fixture(scope="module")
def pair(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("hard"), checkpoints("llama"), tmp_path_factory.mktemp("kv"))
    try:
        pair.start()
        yield pair
    finally:
        pair.place.stop()


def test_a_transfer_that_breaks_leaves_the_answer_as_it_was(pair: Pair) -> None:
    undisturbed, _ = pair.ask()
    (pair.kv / KvFiles.BREAKS).touch()
    tokens, told = pair.ask()
    assert tokens == undisturbed
    assert any("kv cache transfer" in why for why in told["fallbacks"]), told
    pair.nothing_is_held()


def test_doctor_sees_the_order_in_force_and_the_way_that_a_request_took_instead(pair: Pair) -> None:
    (pair.kv / KvFiles.BREAKS).touch()
    found = pair.doctor()
    assert found["order"][0] == "error", found
    assert found["workers"][0] == "ok"
    assert pair.doctor()["order"] == ("ok", "decode_first (always)"), "the next request crosses again"


def test_handoff_delivered_to_a_dead_decode_worker_is_fetched_by_another_one(pair: Pair) -> None:
    """Its kernel has taken the answer, so neither the prefill worker nor Dynamo has seen it get lost."""
    pair.ask()
    served = pair.num_served("prefill")
    (pair.kv / KvFiles.STOPS).write_text(str(pair.place.pid("decode")))
    with ThreadPoolExecutor() as threads:
        lost = threads.submit(pair.place.post, COMPLETIONS, pair.body())
        try:
            pair.place.wait_until(lambda: pair.num_served("prefill") > served, "prefill has answered")
            assert held_in(pair.kv) == 1
        finally:
            pair.place.kill("decode")
        pair.start_workers(successor="decode")
        lost.result()
    pair.nothing_is_held(60)
    # The frontend forgets the dead one in its own time.
    pair.place.wait_until(lambda: pair.place.post(COMPLETIONS, pair.body())[0] == 200, "served", 60)
    tokens, told = pair.ask()
    assert (len(tokens), told["strategy"]) == (6, "decode_first")


def test_without_its_prefill_engine_a_decode_worker_answers_alone(pair: Pair) -> None:
    undisturbed, _ = pair.ask()
    pair.place.send("prefill", signal.SIGUSR1)
    pair.place.wait_until(lambda: pair.place.exit_code("prefill") == 1, "the worker ends with 1", 60)
    tokens, told = pair.ask()
    assert (tokens, told["strategy"]) == (undisturbed, "local")
    found = pair.doctor()
    assert [found[rule][0] for rule in ("workers", "order", "both stages")] == ["error"] * 3, found
    assert found["order"][1].startswith("local"), found
    pair.nothing_is_held()


def test_an_engine_that_stands_still_ends_its_worker_and_the_request_goes_on(pair: Pair) -> None:
    """Of the second stage, which says that it is well all the time. A test above may have ended the one before."""
    undisturbed, _ = pair.ask()
    pair.place.send("prefill", signal.SIGTERM)
    pair.place.wait_until(lambda: pair.place.exit_code("prefill") is not None, "no other second stage", 60)
    pair.start_workers(still="prefill")
    pair.place.wait_until(lambda: pair.ask()[1]["strategy"] == "decode_first", "it is found", 60)
    pair.place.send("still", signal.SIGUSR2)
    pair.place.wait_until(lambda: STANDS_STILL in pair.place.log("still"), "it stands still")
    tokens, told = pair.ask()
    assert tokens == undisturbed
    assert told["fallbacks"], told
    pair.place.wait_until(lambda: pair.place.exit_code("still") == 1, "the worker ends with 1", 60)
    said = pair.place.log("still")
    assert f"none of its requests has had a token for {STALL_SECONDS} s (--engine-stall-timeout)" in said
