"""`trtllm-disagg up` with the demo model: kill -9 of a worker and of the frontend, and what is left afterwards."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from tests.support.deployments import DEMO_CONFIGS, demo_model
from trtllm_disagg.common.interpreter import python
from trtllm_disagg.tools.up.run_dir import ProcessRecord, is_alive, read_processes

#: Three loads, on a machine with other work to do.
SECONDS = 240.0
UP = python("-m", "trtllm_disagg", "up", "--strategy", "prefill_first", "--engine", "embedded")
BODY = {"model": "demo-model", "prompt": "About a list:", "max_tokens": 8, "temperature": 0}


def records(run_dir: Path) -> dict[str, ProcessRecord]:
    return {record.name: record for record in read_processes(run_dir)}


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    # Neither a file nor a server has an event for it.
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def test_killed_worker_and_frontend_restart_and_up_leaves_no_process(tmp_path: Path) -> None:
    # A short path, as a user's is; the one of pytest would be too long for a socket's name.
    tmp = Path(tempfile.mkdtemp(prefix="up-"))
    run_dir, log = tmp_path / "run", tmp_path / "up.log"
    more = (
        *("--model", str(demo_model()), "--engine-configs", str(DEMO_CONFIGS), "--http-port", "0"),
        *("--run-dir", str(run_dir)),
    )
    with log.open("wb") as stderr:
        up = await asyncio.create_subprocess_exec(
            *(*UP, *more),
            env={**os.environ, "TMPDIR": str(tmp)},
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )
    try:
        async with asyncio.timeout(SECONDS):
            assert up.stdout is not None
            ready = (await up.stdout.readline()).decode()
            assert ready.startswith("ready "), log.read_text()
            url = ready.split()[1]
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:

                async def answer() -> str | None:
                    with contextlib.suppress(httpx.HTTPError):
                        response = await client.post("/v1/completions", json=BODY)
                        return response.json()["choices"][0]["text"] if response.status_code == 200 else None
                    return None

                async def is_back(name: str, gone: ProcessRecord) -> bool:
                    now = records(run_dir)[name]
                    return now.born != gone.born and now.state == "ready" and await answer() == expected

                expected = await answer()
                assert expected

                before = records(run_dir)
                os.kill(before["prefill-0"].pid, signal.SIGKILL)
                await until(lambda: is_back("prefill-0", before["prefill-0"]))
                os.kill(before["frontend"].pid, signal.SIGKILL)
                await until(lambda: is_back("frontend", before["frontend"]))
                assert records(run_dir)["decode-0"] == before["decode-0"]
            up.terminate()
            assert await up.wait() == 0
        assert not any(is_alive(record) for record in records(run_dir).values())
        times = [float(line[1:7]) for line in log.read_text().splitlines() if line.startswith("[")]
        assert times == sorted(times)
        assert os.listdir(tmp) == []
    finally:
        if up.returncode is None:
            up.kill()
            await up.wait()
        shutil.rmtree(tmp)
