"""A worker whose engine suits one role flips only by force, and then gets what it can carry."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx
import yaml

from tests.support.deployments import Worker, demo_config, served
from trtllm_disagg.processes.interpreter import python

SECONDS = 60.0
TRANSCEIVER = {"cache_transceiver_config": {"backend": "NIXL"}}
PREFILL = {"max_batch_size": 4, "cuda_graph_config": None} | TRANSCEIVER
DECODE = {"max_batch_size": 64} | TRANSCEIVER


def test_a_small_worker_flips_by_force_and_gets_its_share_of_the_decodes(tmp_path: Path) -> None:
    config = demo_config("prefill_first", tmp_path / "run", engine="recording", prefill_workers=2)
    for role, args in (("prefill", PREFILL), ("decode", DECODE)):
        (tmp_path / f"{role}.yaml").write_text(yaml.safe_dump(args))
    files = {role: tmp_path / f"{role}.yaml" for role in config.engine_configs}
    with served(replace(config, engine_configs=files)) as deployed, httpx.Client(timeout=SECONDS) as http:
        small = deployed.deployment.of_role("prefill")[1]
        instance = Worker(small, http).instance_id
        code, said = flip(deployed.deployment.run_dir, instance)
        assert (code, small.role) == (1, "prefill")
        assert "to: 'decode' is not allowed with cuda_graph_config: null (expected graphs)" in said
        assert "max_batch_size: 4 (expected at least 32): another decode worker has 64" in said

        code, said = flip(deployed.deployment.run_dir, instance, "--force")
        assert (code, small.role, said.count("warning: ")) == (0, "decode", 2)
        body = {"ignore_eos": True, "nvext": {"extra_fields": ["engine_data"]}}
        decoded = Counter[str]()
        for number in range(34):
            answer = deployed.openai.completions.create(
                model=config.served_model_name, prompt=[5, 6, 7, number], max_tokens=2, extra_body=body
            ).to_dict()
            decoded[answer["nvext"]["engine_data"]["disagg"]["decode_instance"]] += 1  # type: ignore[index]
        # A new one has its first turn at once.
        assert 1 <= decoded[f"{Worker(small, http).instance_id:x}"] <= 4
        assert sum(decoded.values()) == 34


def flip(run_dir: Path, instance: int, *more: str) -> tuple[int, str]:
    """Into decode: the exit code of the real command, and what it says."""
    where = ("--run-dir", str(run_dir), "--instance", f"{instance:x}", "--to", "decode")
    command = [*python("-m", "trtllm_disagg", "flip", *where), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return done.returncode, done.stdout + done.stderr
