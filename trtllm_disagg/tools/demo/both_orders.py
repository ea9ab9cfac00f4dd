"""Runs `trtllm-disagg demo`: per order a deployment, a question, and a timeline of the workers."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientTimeout
from PIL.Image import Image
from PIL.Image import open as open_image
from rich.color import Color
from rich.style import Style
from rich.text import Text

from trtllm_disagg.common.console import Console
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.common.model_directory import is_hub_name, servable_model
from trtllm_disagg.config.yaml_file import shipped
from trtllm_disagg.engines.demo_model.building import build_demo_model
from trtllm_disagg.engines.demo_model.drawings import data_url, draw
from trtllm_disagg.engines.demo_model.recipe import (
    DEFAULT_DIRECTORY,
    DEFAULT_RECIPE,
    DEFAULT_VISION_DIRECTORY,
    VISION_RECIPE,
)
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import StrategySpec, orders
from trtllm_disagg.tools.trace.reading import Trace, read_traces
from trtllm_disagg.tools.trace.waterfall import duration, waterfall
from trtllm_disagg.tools.up.http import session
from trtllm_disagg.tools.up.lifecycle import Deployment, deployment_in_background
from trtllm_disagg.tools.up.plan import DeploymentConfig
from trtllm_disagg.tools.up.run_dir import scratch_directory
from trtllm_disagg.tools.up.status import status_for
from trtllm_disagg.tools.up.up_command import default_name, engine_configs_in

_TIMEOUT_SECONDS = 60.0
_TRACE_SECONDS = 5.0
#: Two readings of the wall clock may differ by this.
_CLOCK_NS = 1_000_000
_INDENT = "   "
#: Of an image in a terminal.
_IMAGE_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A streamed answer. Times in seconds since the epoch (spans: nanoseconds)."""

    text: str
    sent: float
    first_text: float
    done: float


def stream_chat(
    base_url: str,
    model: str,
    question: str | list[dict[str, Any]],
    *,
    max_tokens: int,
    on_text: Callable[[str], None] = lambda _: None,
) -> ChatAnswer:
    """Sends a question, a text or parts, and streams the answer to `on_text`. Raises OSError when there is none, or an
    error.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    try:
        return asyncio.run(_streamed(f"{base_url}/v1/chat/completions", body, on_text))
    except ClientError as error:
        raise ConnectionError(f"the request failed: {error}") from None


async def _streamed(url: str, body: dict[str, Any], on_text: Callable[[str], None]) -> ChatAnswer:
    parts: list[str] = []
    sent = time.time()
    first_text = 0.0
    async with (
        session(url, timeout=ClientTimeout(sock_read=_TIMEOUT_SECONDS)) as client,
        client.post(url, json=body) as response,
    ):
        if response.status != HTTPStatus.OK:
            raise ConnectionError(f"the request failed: {response.status}: {await response.text()}")
        async for line in response.content:
            data = line.decode().removeprefix("data: ").strip()
            if line.startswith(b"data: ") and data != "[DONE]":
                for text in _texts(json.loads(data)):
                    first_text = first_text or time.time()
                    parts.append(text)
                    on_text(text)
    done = time.time()
    return ChatAnswer("".join(parts), sent, first_text or done, done)


def _texts(event: dict[str, Any]) -> Iterator[str]:
    if "choices" not in event:
        raise ConnectionError(f"the request failed: {event.get('message', event)}")
    for choice in event["choices"]:
        if text := choice["delta"].get("content"):
            yield text


def show_both_orders(args: argparse.Namespace) -> ExitCode:
    path, is_default = Path(args.model), args.model in (DEFAULT_DIRECTORY, DEFAULT_VISION_DIRECTORY)
    if not is_hub_name(args.model) and (is_default or not path.exists()):
        also = "" if args.image is None else " and on drawings"
        _say(f"1. The model: {path}, trained here on Python's documentation{also}")
        build_demo_model(path, recipe=DEFAULT_RECIPE if args.image is None else VISION_RECIPE)
    else:
        _say(f"1. The model: {args.model}")
    model = servable_model(args.model)
    if args.image is not None:
        args.image = _shown_image(args.image)
    with scratch_directory("trtllm-disagg-demo-") as scratch:
        answers = [
            _ask(number, order, scratch.path / order.name, model, args)
            for number, order in enumerate(orders(), 2)
        ]
        same = len({answer.text for answer in answers}) == 1
        scratch.is_kept = not same
    if same:
        _say("Both orders gave the same answer.")
        return ExitCode.DONE
    _say(f"The two orders gave DIFFERENT answers: a bug. The logs are kept in {scratch.path}")
    return ExitCode.FAILED


def _ask(
    number: int, order: StrategySpec, run_dir: Path, model: Path, args: argparse.Namespace
) -> ChatAnswer:
    _say(f"{number}. {order.name}: the frontend sends the request to the {order.entry_role} worker first")
    configs = shipped(args.engine_configs)
    config = DeploymentConfig(
        strategy=order.name,
        model=str(model),
        served_model_name=default_name(args.model),
        run_dir=run_dir,
        http_port=0,
        engine="embedded",
        engine_configs=engine_configs_in(configs, order.name) if configs.is_dir() else {},
        images=args.image is not None,
    )
    asked = args.question
    if args.image is not None:
        image = {"type": "image_url", "image_url": {"url": data_url(args.image)}}
        asked = [{"type": "text", "text": args.question}, image]
    with deployment_in_background(config, status_for(sys.stderr)) as deployment:
        # Not shown: the first request also connects the two engines.
        stream_chat(deployment.base_url, config.served_model_name, "Hello", max_tokens=2)
        print(f"\n{_INDENT}> {args.question}\n{_INDENT}", end="")
        answer = stream_chat(
            deployment.base_url,
            config.served_model_name,
            asked,
            max_tokens=args.max_tokens,
            on_text=lambda text: print(text.replace("\n", f"\n{_INDENT}"), end="", flush=True),
        )
        print("\n")
        if (trace := trace_of(deployment, answer)) is not None:
            console = Console(soft_wrap=True)
            for line in waterfall(trace, console.width - len(_INDENT)):
                console.print(_INDENT, line, sep="")
        first = duration((answer.first_text - answer.sent) * 1000)
        print(f"{_INDENT}first token at the client after {first}\n", flush=True)
    return answer


def trace_of(deployment: Deployment, answer: ChatAnswer) -> Trace | None:
    """The trace of the answer; None if the workers have not written their spans within _TRACE_SECONDS."""
    deadline = time.monotonic() + _TRACE_SECONDS
    while time.monotonic() < deadline:
        for trace in read_traces(deployment.run_dir):
            if (
                trace.start >= answer.sent * 1e9 - _CLOCK_NS
                and len({node.worker for node in trace.nodes if node.is_ours}) == 2
            ):
                return trace
        time.sleep(0.02)
    return None


def _shown_image(file: Path) -> Image:
    """The image of the file, or a drawing, printed with two pixels a character. Raises ConfigError."""
    try:
        image = draw("red", "circle", random.Random(1)) if file == Path() else open_image(file).convert("RGB")
    except (OSError, ValueError) as error:
        raise ConfigError.bad_value("--image", str(file), f"a PNG, JPEG or WEBP file ({error})") from None
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        print(f"{_INDENT}the image: {'a drawing of a red circle' if file == Path() else file}")
        return image
    width = min(_IMAGE_COLUMNS, image.width)
    small = image.resize((width, max(2, round(width * image.height / image.width) // 2 * 2)))
    for row in range(0, small.height, 2):
        line = Text(_INDENT)
        for column in range(small.width):
            above, below = (_colour(small, column, row + each) for each in (0, 1))
            line.append("\u2580", Style(color=above, bgcolor=below))
        console.print(line)
    return image


def _colour(image: Image, x: int, y: int) -> Color:
    pixel = image.getpixel((x, y))
    assert isinstance(pixel, tuple)  # RGB
    return Color.from_rgb(*pixel[:3])


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)
