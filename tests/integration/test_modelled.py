"""The modelled engine behind the real frontend: both orders, a switch between them, and one text."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import yaml
from tokenizers import Tokenizer

from tests.integration.test_changes_under_load import switch
from tests.support.deployments import wait_until
from tests.support.modelled_cores import MEASURED, TOKENS_PER_BLOCK
from tests.support.models import VOCAB, write_tokenizer
from trtllm_disagg.engines.recording.result import scripted_token
from trtllm_disagg.tools.trace.reading import Trace, read_traces
from trtllm_disagg.tools.up.lifecycle import Deployment, running_deployment
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import DeploymentConfig, shared_env, worker_spec
from trtllm_disagg.tools.up.ports import free_system_ports
from trtllm_disagg.tools.up.up_command import engine_configs_in

PROMPT = "a prompt that is longer than two blocks of thirty-two tokens"
MAX_TOKENS = 24
TIME_SCALE = 2
BLOCK_BYTES = TOKENS_PER_BLOCK * MEASURED["kv_bytes_per_token"]
#: Of a block's KV on its way, by this machine's clock: a link that is slow on purpose. All else takes less.
BLOCK_SECONDS = 0.5


def write_model(directory: Path) -> Path:
    """A tokenizer and a config.json: no weights."""
    directory.mkdir()
    write_tokenizer(directory)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB}
    config |= {"max_position_embeddings": 2048, "num_hidden_layers": 2, "eos_token_id": 1, "bos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_engine_configs(directory: Path) -> Path:
    directory.mkdir()
    content = {
        "max_seq_len": 1024,
        "enable_chunked_prefill": True,
        "cache_transceiver_config": {"backend": "NIXL"},
        "modelled": {
            "measured": MEASURED,
            "time_scale": TIME_SCALE,
            "link_gb_per_second": BLOCK_BYTES / 1e9 / BLOCK_SECONDS * TIME_SCALE,
        },
    }
    for role in ("prefill", "decode"):
        (directory / f"{role}.yaml").write_text(yaml.safe_dump(content))
    return directory


async def test_both_orders_and_a_switch_give_the_text_of_one_engine(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    config = DeploymentConfig(
        strategy="prefill_first",
        model=str(model),
        served_model_name="simulated",
        run_dir=tmp_path / "run",
        http_port=0,
        engine="modelled",
        engine_configs=engine_configs_in(write_engine_configs(tmp_path / "configs"), "prefill_first"),
    )
    async with running_deployment(config) as deployment, httpx.AsyncClient(timeout=60) as client:
        for order in ("prefill_first", "decode_first"):
            if order != config.strategy:
                assert await switch(deployment, order) == 0
            text, way = await ask(client, deployment, f"{order}: {PROMPT}")
            prompt = tokenizer.encode(f"{order}: {PROMPT}").ids
            assert text == tokenizer.decode([scripted_token(prompt, i) for i in range(MAX_TOKENS)])
            blocks = -(-len(prompt) // TOKENS_PER_BLOCK)
            assert (way["strategy"], way["kv_transfer_bytes"]) == (order, blocks * BLOCK_BYTES)
            assert "fallbacks" not in way
            await asyncio.to_thread(the_slow_link_is_found_from_the_trace, config.run_dir, order, blocks)
        await one_started_as_before_the_switch_follows_it(config)


async def one_started_as_before_the_switch_follows_it(config: DeploymentConfig) -> None:
    """As one that was loading meanwhile."""
    (port,) = free_system_ports(1)
    late = worker_spec(config, "prefill", 7, shared_env(config, os.environ), port)
    process = ManagedProcess(late, config.run_dir / "late.log")
    await process.start({**os.environ, **late.env})
    try:
        async with asyncio.timeout(60):
            while process.is_running and "worker ready" not in process.log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    finally:
        process.terminate()
        await process.wait()
    said = process.log.read_text()
    assert "the other workers were switched meanwhile: decode_first instead of prefill_first" in said
    assert process.ended_well, said


def the_slow_link_is_found_from_the_trace(run_dir: Path, order: str, blocks: int) -> None:
    def written() -> list[Trace]:
        return [
            trace
            for trace in read_traces(run_dir)
            if trace.order == order and any(node.span.name == "kv_transfer" for node in trace.nodes)
        ]

    wait_until(written, f"both workers have written their spans under {order}")
    longest, milliseconds = written()[-1].blame[0]
    assert (longest.span.name, longest.worker) == ("kv_transfer", "decode-0")
    assert milliseconds > 900 * BLOCK_SECONDS * blocks


async def ask(client: httpx.AsyncClient, deployment: Deployment, prompt: str) -> tuple[str, dict[str, Any]]:
    body = {
        "model": "simulated",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "nvext": {"extra_fields": ["engine_data"]},
    }
    answer = await client.post(f"{deployment.base_url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    return said["choices"][0]["text"], said["nvext"]["engine_data"]["disagg"]
