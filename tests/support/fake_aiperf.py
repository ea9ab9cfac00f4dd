"""A command in AIPerf's place: sends a schedule's requests at their times, and writes what they took as AIPerf 0.13.0
does. `command_in` makes a file of it, for `--aiperf`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx


def command_in(directory: Path) -> Path:
    file = directory / "aiperf"
    root = Path(__file__).parents[2]
    file.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(root)!r})\n"
        "from tests.support.fake_aiperf import main\nmain(sys.argv[1:])\n"
    )
    file.chmod(0o755)
    return file


def main(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        print("aiperf 0.13.0")
        return
    given = dict(pairwise(arguments))
    lines = [json.loads(line) for line in Path(given["--input-file"]).read_text().splitlines()]
    records = asyncio.run(_send_all(lines, given["--url"]))
    file = Path(given["--artifact-dir"]) / "profile_export.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


async def _send_all(lines: list[dict[str, Any]], url: str) -> list[dict[str, Any]]:
    # The client's first use of a connection takes longer than any other.
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        begun = asyncio.get_running_loop().time() + 0.2
        return await asyncio.gather(*(_send(client, line, begun, f"{url}/v1/completions") for line in lines))


async def _send(client: httpx.AsyncClient, line: dict[str, Any], begun: float, url: str) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(begun + line["timestamp"] / 1000 - loop.time())
    name, begin_ns = str(uuid.uuid4()), time.time_ns()
    moments: list[int] = []
    usage: dict[str, int] = {}
    async with client.stream("POST", url, json=line["payload"], headers={"x-request-id": name}) as response:
        async for text in response.aiter_lines():
            if not text.startswith("data: ") or text == "data: [DONE]":
                continue
            event = json.loads(text.removeprefix("data: "))
            usage = event.get("usage") or usage
            if event["choices"]:
                moments.append(time.time_ns())
    end_ns = time.time_ns()
    metadata = {
        "conversation_id": line["session_id"],
        "x_request_id": name,
        "request_start_ns": begin_ns,
        "request_end_ns": end_ns,
    }
    if response.status_code != 200:
        return {"metadata": metadata, "error": {"code": response.status_code, "message": "refused"}}
    gaps = [(after - before) / 1e6 for before, after in pairwise(moments)]
    values: dict[str, Any] = {
        "request_latency": (moments[-1] - begin_ns) / 1e6,
        "time_to_first_token": (moments[0] - begin_ns) / 1e6,
        "inter_token_latency": (moments[-1] - moments[0]) / 1e6 / (usage["completion_tokens"] - 1),
        "inter_chunk_latency": gaps,
        "usage_prompt_tokens": usage["prompt_tokens"],
        "usage_completion_tokens": usage["completion_tokens"],
    }
    return {"metadata": metadata, "metrics": {name: {"value": value} for name, value in values.items()}}
