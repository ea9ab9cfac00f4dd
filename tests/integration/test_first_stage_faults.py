"""First stages die, freeze and leave in the middle of long streams: each stream goes on, token for token."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.integration.test_faults import SAMPLINGS, config
from tests.support.deployments import SETTLE_SECONDS, Worker, wait_until
from tests.support.load import path_of, prompt_of
from trtllm_disagg.tools.up.command_socket import send_to_up
from trtllm_disagg.tools.up.commands import Scale
from trtllm_disagg.tools.up.lifecycle import Deployment, running_deployment
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import ProcessRole

NUM_STREAMS = 9
#: Long enough that all of them run when the faults come.
NUM_TOKENS = 300
SECONDS = 90.0
#: A decode worker that dies between the first token and the read of its KV leaves that KV to the end of its lease.
LEASE_SECONDS = 8.0


@dataclass(slots=True)
class Stream:
    """An answer as its client has seen it."""

    number: int
    text: str = ""
    ends: list[str] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, client: httpx.AsyncClient, url: str) -> Stream:
        body = {
            "model": "tiny",
            **prompt_of(self.number, has_image=self.number % 2 == 1),
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | SAMPLINGS[self.number % 3]
        try:
            async with client.stream("POST", url + path_of(body), json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._hear(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.errors.append(repr(error))
        finally:
            self.began.set()
        return self

    def _hear(self, said: dict[str, Any]) -> None:
        if "choices" not in said:
            self.errors.append(said)
            return
        for choice in said["choices"]:
            self.text += choice["text"] if "text" in choice else choice["delta"]["content"] or ""
            if self.text:
                self.began.set()
            if choice.get("finish_reason"):
                self.ends.append(choice["finish_reason"])
        self.usage = said.get("usage") or self.usage

    @property
    def outcome(self) -> tuple[str, list[str], list[Any], tuple[int, int]]:
        usage = self.usage or {}
        tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        return self.text, self.ends, self.errors, tokens


class Clients:
    def __init__(self, client: httpx.AsyncClient, deployment: Deployment) -> None:
        self._client = client
        self._url = deployment.base_url
        self.streams: list[Stream] = []
        self._reading: list[asyncio.Task[Stream]] = []

    async def begin(self) -> None:
        """All streams run, and each has given something."""
        self.streams = [Stream(number) for number in range(NUM_STREAMS)]
        self._reading = [asyncio.create_task(stream.read(self._client, self._url)) for stream in self.streams]
        for stream in self.streams:
            await stream.began.wait()

    async def outcomes(self) -> list[Any]:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*self._reading)
        return [stream.outcome for stream in self.streams]


def engine_of(process: ManagedProcess) -> psutil.Process:
    (engine,) = psutil.Process(process.pid).children()
    return engine


@pytest.mark.parametrize(
    ("strategy", "first", "drain_seconds"),
    # A worker without an engine relays to the end; one that may not wait hands its streams back.
    [("prefill_first", "prefill", None), ("decode_first", "decode", 0.1)],
)
async def test_streams_continue_when_their_first_stage_is_lost(
    strategy: str, first: ProcessRole, drain_seconds: float | None, llava: Path, tmp_path: Path
) -> None:
    configured = config(strategy, llava, tmp_path / "run")
    setting = replace(
        configured,
        engine_configs={
            role: with_short_lease(file, tmp_path / f"{role}.yaml")
            for role, file in configured.engine_configs.items()
        },
        prefill_workers=3 if first == "prefill" else 1,
        decode_workers=3 if first == "decode" else 1,
        drain_seconds=drain_seconds,
        worker_args=("--frozen-seconds", "1"),
    )
    async with running_deployment(setting) as deployment, httpx.AsyncClient(timeout=SECONDS) as client:
        clients = Clients(client, deployment)
        one, two, three = deployment.of_role(first)
        await clients.begin()
        undisturbed = await clients.outcomes()
        prompts = [tokens[0] for _, _, _, tokens in undisturbed]
        assert [tokens for _, _, _, tokens in undisturbed] == [(n, NUM_TOKENS) for n in prompts]
        assert [(ends, errors) for _, ends, errors, _ in undisturbed] == [(["length"], [])] * NUM_STREAMS

        # -- an engine dies, and another worker is frozen: both processes have to go in the end
        await clients.begin()
        engine_of(one).kill()
        psutil.Process(two.pid).suspend()
        assert await clients.outcomes() == undisturbed
        await ended(one, two)
        assert (one.returncode, two.returncode) == (1, -signal.SIGKILL)

        # -- a worker is told to leave
        await asyncio.to_thread(send_to_up, deployment.run_dir, Scale({first: 2}))
        (four,) = [each for each in deployment.of_role(first) if each not in (one, two, three)]
        await clients.begin()
        psutil.Process(three.pid).terminate()
        assert await clients.outcomes() == undisturbed
        await ended(three)
        assert three.returncode == 0

        # -- and nothing is lost
        second: ProcessRole = "decode" if first == "prefill" else "prefill"
        await asyncio.to_thread(hold_nothing, [four, *deployment.of_role(second)])


def with_short_lease(file: Path, changed: Path) -> Path:
    settings = yaml.safe_load(file.read_text())
    settings["cache_transceiver_config"]["kv_transfer_timeout_ms"] = int(LEASE_SECONDS * 1000)
    changed.write_text(yaml.safe_dump(settings))
    return changed


async def ended(*processes: ManagedProcess) -> None:
    async with asyncio.timeout(SECONDS):
        while any(process.returncode is None for process in processes):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def hold_nothing(processes: list[ManagedProcess]) -> None:
    with httpx.Client(timeout=SECONDS) as http:
        for process in processes:
            worker = Worker(process, http)
            seconds = LEASE_SECONDS + SETTLE_SECONDS
            wait_until(lambda: not worker.held_and_counted()[0], f"{process.name} holds nothing", seconds)  # noqa: B023
