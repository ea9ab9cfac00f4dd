"""`trtllm-disagg doctor --url`, asked of deployments that serve."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.deployments import DISAGGREGATED, MODEL_NAME, Fleet


@pytest.mark.parametrize("strategy", DISAGGREGATED)
def test_a_deployment_that_serves_has_no_errors_and_nothing_unknown(strategy: str, fleet: Fleet) -> None:
    deployed = fleet[strategy]
    command = [sys.executable, "-m", "trtllm_disagg", "doctor", "--url", deployed.url, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = json.loads(ended.stdout)
    assert (said["model"], said["errors"], said["notes"], said["not_known"]) == (MODEL_NAME, 0, 0, 0)
    value = {row["rule"]: row["value"] for row in said["rows"]}
    assert sorted(value["workers"].split(", ")) == sorted(worker.name for worker in deployed.workers)
    assert value["order"].startswith(f"{strategy} (")
    assert any(f"{worker.instance_id:x}" in value["both stages"] for worker in deployed.workers)
    assert int(value["KV moved"].split()[0].replace(",", "")) > 0
    assert value["KV events"].startswith("the router found ")


@pytest.mark.parametrize("strategy", DISAGGREGATED)
def test_top_shows_the_order_in_force_and_what_each_worker_did(strategy: str, fleet: Fleet) -> None:
    deployed = fleet[strategy]
    deployed.openai.completions.create(
        model=MODEL_NAME, prompt="What is a list?", max_tokens=8, extra_body={"ignore_eos": True}
    )
    command = [sys.executable, "-m", "trtllm_disagg", "top", "--once", "--json"]
    for where in (["--run-dir", str(deployed.deployment.run_dir)], ["--url", deployed.url]):
        ended = subprocess.run([*command, *where], capture_output=True, text=True, timeout=60)

        assert ended.returncode == 0, ended.stdout + ended.stderr
        said = json.loads(ended.stdout)
        assert (said["strategy"], said["model"], said["url"]) == (strategy, MODEL_NAME, deployed.url)
        assert said["doubt"] == ""
        assert said["frontend"]["ttft_seconds"]["p50"] > 0
        assert said["frontend"]["itl_seconds"]["count"] > 0
        processes = {process["name"]: process for process in said["processes"]}
        assert {process["state"] for process in processes.values()} == {"ready"}
        for worker in deployed.workers:
            load = processes[worker.name]["load"]
            assert load["kv_blocks_total"] > 0
            assert load["prefill_tokens" if worker.role == "prefill" else "decode_tokens"] > 0
            assert None not in (load["batch"], load["queued"], load["handoffs_held"])
