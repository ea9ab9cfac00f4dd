"""Two revisions behind one name: under load, each request is answered by one of them, in full."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Checkpoints
from tests.integration.test_faults import config
from tests.support.dynamo_deployment import COMPLETIONS, START_TIMEOUT, DynamoDeployment
from tests.support.load import Load, bodies, first_stage
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.common.interpreter import python
from trtllm_disagg.tools.up.lifecycle import running_deployment
from trtllm_disagg.tools.up.plan import LOOPBACK

ROOT = Path(__file__).parents[2]
SECONDS = 300.0


@pytest.mark.parametrize(
    ("strategy", "engine", "new_seed"),
    [("agg", "embedded", 1), ("decode_first", "recording", 0), ("router", "recording", 0)],
    ids=["another model", "the same model in pairs", "pairs made by the frontend"],
)
async def test_under_load_each_request_is_answered_in_full_by_workers_of_one_revision(
    strategy: str, engine: str, new_seed: int, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    setting = config(strategy, checkpoints("llama"), tmp_path / "run")
    # By themselves the old workers would give up the long request as they leave.
    setting = replace(setting, engine=engine, engine_configs={}, drain_seconds=0.0)
    asked = [*bodies("tiny", 6), bodies("tiny", 1, max_tokens=700)[0]]
    for body in asked:
        body["nvext"]["extra_fields"] += ["engine_data"]
    async with running_deployment(setting) as deployment, httpx.AsyncClient(timeout=SECONDS) as client:
        load = Load(client, deployment.base_url, asked)
        old = [process for process in deployment.processes if process.role != "frontend"]
        await load.learn()
        async with load.running(3):
            to = ("--to", "v2", "--model", str(checkpoints("llama", new_seed)))
            told = await command("rollout", "--run-dir", str(deployment.run_dir), *to)
        of_old = load.expected
        await load.learn()

    workers = len(old)
    assert not {*old} & {*deployment.processes}
    assert told == f"v2 serves with {workers} workers; {workers} old ones stopped, 0 requests given up\n"
    pairs = set[tuple[int, str | None]]()
    assert all("instead of" in each for each in load.wrong), "a request failed"
    for turn, answer in load.answered:
        assert answer["completion_token_ids"] in (of_old[turn], load.expected[turn])
        disagg = answer["engine_data"]["disagg"]
        assert "fallbacks" not in disagg
        pairs.add((first_stage(answer), disagg.get("prefill_instance")))
    assert len(pairs) == len({first for first, _ in pairs}) == 2
    assert (of_old != load.expected) is bool(new_seed)
    assert {process.returncode for process in old} == {0}


async def test_in_place_the_other_first_stage_of_a_revision_takes_all_requests(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    setting = config("decode_first", checkpoints("llama"), tmp_path / "run", "decode")
    setting = replace(setting, engine="recording", engine_configs={})
    async with running_deployment(setting) as deployment, httpx.AsyncClient(timeout=SECONDS) as client:
        load = Load(client, deployment.base_url, bodies("tiny", 6))
        await load.learn()
        async with load.running(3):
            await command("rollout", "--run-dir", str(deployment.run_dir), "--to", "v2", "--in-place")
    assert load.wrong == []


async def command(*words: str) -> str:
    """What it prints to stdout."""
    process = await asyncio.create_subprocess_exec(
        *python("-m", "trtllm_disagg", *words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(SECONDS):
        out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode()


async def test_workers_that_were_started_by_hand_are_replaced_under_load_without_a_wrong_answer(
    place: DynamoDeployment, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AdminKey.create(key := tmp_path / "key")
    engine = ["--engine", "recording", "--model", str(checkpoints("llama")), "--served-model-name", "tiny"]
    own = [*engine, "--admin-key-file", str(key), "--disaggregation-strategy", "decode_first"]

    def pair(revision: str) -> dict[str, list[str]]:
        worker = ["trtllm_disagg", "worker", *own, "--worker-revision", revision, "--disaggregation-mode"]
        return {f"{revision}-{role}": [*worker, role] for role in ("prefill", "decode")}

    place.start_frontend()
    place.start_workers(pair("v1"))
    asked = bodies("tiny", 6)
    place.wait_ready(asked[0])
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "discovery"))
    url = f"http://{LOOPBACK}:{place.http_port}"
    where = ("--namespace", "dynamo", "--key-file", str(key), "--frontend", url)
    async with httpx.AsyncClient(timeout=SECONDS) as client:
        load = Load(client, url, asked)
        await load.learn()
        async with load.running(3):
            place.start_workers(pair("v2"))
            told = await command("rollout", *where, "--from", "v1", "--to", "v2")
            await load.answers(6)
    assert told == "v2 serves with 2 workers; 2 old ones stopped, 0 requests given up\n"
    assert load.wrong == []
    assert len(load.answered_by) == 2
    place.wait_until(lambda: {place.exit_code(name) for name in pair("v1")} == {0}, "v1 has ended")


# -- this version beside the release before


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False).stdout


@pytest.fixture
def python_before(tmp_path: Path) -> Path:
    """An interpreter with trtllm_disagg from the previous release's wheel."""
    log = (ROOT / "CHANGELOG.md").read_text()
    named, *_ = re.findall(r"^## \d\S* \(.*\b([0-9a-f]{8,40})\)$", log, re.MULTILINE)
    commit = git("describe", "--tags", "--abbrev=0", "HEAD^") or git(
        "rev-parse", "-q", "--verify", f"{named}^0"
    )
    if not commit:
        pytest.skip("the commit of the release before is not in this clone")
    source, tree, interpreter = (tmp_path / name for name in ("source", "before", "python"))
    source.mkdir()
    subprocess.run(["tar", "-x", "-C", source], input=git("archive", commit.decode().strip()), check=True)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    subprocess.run([*build, str(tmp_path), str(source)], check=True, capture_output=True)
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tree)
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH="{tree}" exec "{sys.executable}" -P "$@"\n')
    interpreter.chmod(0o755)
    where = [str(interpreter), "-c", "import trtllm_disagg; print(trtllm_disagg.__file__)"]
    assert subprocess.check_output(where).startswith(str(tree).encode())
    return interpreter


async def test_a_handoff_between_this_version_and_the_one_before_is_right_in_both_orders(
    place: DynamoDeployment,
    python_before: Path,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    AdminKey.create(key := tmp_path / "key")
    hello = {"prompt": "hello", "max_tokens": 9, "ignore_eos": True}

    def worker(role: str, name: str) -> list[str]:
        where = ["--namespace", name, "--served-model-name", name, "--admin-key-file", str(key)]
        model = ["--engine", "recording", "--model", str(checkpoints("llama"))]
        stage = ["--disaggregation-mode", role, "--disaggregation-strategy", "prefill_first"]
        return ["trtllm_disagg", "worker", *model, *where, *(stage if role != "agg" else ())]

    def answer(name: str) -> tuple[list[int], dict[str, Any]]:
        body = hello | {"model": name, "nvext": {"extra_fields": ["completion_token_ids", "engine_data"]}}
        nvext = place.post_ok(COMPLETIONS, body)["nvext"]
        return nvext["completion_token_ids"], nvext["engine_data"]["disagg"]

    before = {f"before-{role}": worker(role, f"{role}-before") for role in ("prefill", "decode")}
    now = {
        "now-decode": worker("decode", "prefill-before"),
        "now-prefill": worker("prefill", "decode-before"),
    }
    place.start_frontend()
    place.start_workers(before, str(python_before))
    place.start_workers(now | {"alone": worker("agg", "alone")})
    for name in (*before, *now, "alone"):
        place.wait_until(lambda: "worker ready" in place.log(name), name, START_TIMEOUT)  # noqa: B023
    for name in ("alone", "prefill-before", "decode-before"):
        place.wait_ready(hello | {"model": name})
    tokens, _ = answer("alone")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "discovery"))
    for order in ("prefill_first", "decode_first"):
        for name in ("prefill-before", "decode-before"):
            if order == "decode_first":
                url = f"http://{LOOPBACK}:{place.http_port}"
                where = ("--namespace", name, "--key-file", str(key), "--frontend", url)
                await command("switch", "--to", order, *where)
            given, told = answer(name)
            assert (given, told["strategy"], told.get("fallbacks")) == (tokens, order, None)
