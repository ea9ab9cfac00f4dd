"""Loads images by Dynamo's loader: what cannot be loaded is the client's error, in one short sentence."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from collections.abc import AsyncIterator, Sequence
from io import BytesIO
from typing import Any

import pytest
from dynamo.common.http import close_http_client, url_validator
from dynamo.common.http.url_validator import UrlValidationPolicy
from PIL import Image

from tests.support.handling import request
from trtllm_disagg.config.worker_config import ImageConfig
from trtllm_disagg.dynamo_runtime import image_loader as module
from trtllm_disagg.dynamo_runtime.image_loader import image_loader
from trtllm_disagg.engine import image_inputs
from trtllm_disagg.engine.image_inputs import ImageInputs
from trtllm_disagg.errors import InvalidRequestError
from trtllm_disagg.types import Images


def png(colour: str = "red", size: tuple[int, int] = (4, 3)) -> bytes:
    saved = BytesIO()
    Image.new("RGB", size, colour).save(saved, "PNG")
    return saved.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def bomb(side: int) -> bytes:
    """The header of an image of `side` x `side` pixels, and a few bytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    ends = chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + ends


async def load(*urls: str, max_mb: int = 1) -> Sequence[Any]:
    return (await image_loader(ImageConfig(max_mb))(images_at(*urls)))()


def images_at(*urls: str) -> Images:
    return Images([{"Url": url} for url in urls], [])


#: A permit for each request that waits at `/slow`.
slow = asyncio.Semaphore(0)
REDIRECTS = {"/to-private": "http://10.0.0.1/a.png", "/to-file": "file:///etc/passwd", "/loop": "/loop"}


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The only host of its network that may be read. Serves `/red`, `/large` (2 MB), `/empty`, `/text`, REDIRECTS, and
    `/changing`, which is broken at first; `/slow` never ends; all else is 404.
    """
    policy = UrlValidationPolicy(allow_http=True)
    monkeypatch.setattr(UrlValidationPolicy, "from_env", lambda: policy)
    monkeypatch.setattr(url_validator, "is_blocked_ip", lambda ip: ip != "127.0.0.1")
    monkeypatch.setattr(module, "_SECONDS", 0.5)
    bodies = {"/red": png(), "/large": bytes(2 << 20), "/empty": b"", "/text": b"no image"}
    bodies["/changing"] = png()[:50]
    stopped = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        if path.startswith("/slow"):
            slow.release()
            await stopped.wait()
        status, body = ("200 OK", bodies[path]) if path in bodies else ("404 Not Found", b"")
        if path in REDIRECTS:
            status = f"302 Found\r\nLocation: {REDIRECTS[path]}"
        bodies["/changing"] = png() if path == "/changing" else bodies["/changing"]
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
        )
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    stopped.set()
    listening.close()
    await close_http_client()  # it belongs to this event loop


async def test_images_come_as_rgb_in_the_order_of_their_markers(server: str) -> None:
    red, blue = await load(f"{server}/red", data_url(png("blue")))
    assert [(each.mode, each.getpixel((0, 0))) for each in (red, blue)] == [
        ("RGB", (255, 0, 0)),
        ("RGB", (0, 0, 255)),
    ]


async def test_servers_that_never_answer_delay_no_other_image(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECONDS", 1000.0)
    inputs = ImageInputs(image_loader(ImageConfig(1)), None)

    async def ask(url: str) -> None:
        async with inputs.of(request(), images_at(url)) as given:
            assert given["multi_modal_data"]["image"][0].size == (4, 3)

    async with asyncio.TaskGroup() as group:
        waiting = []
        for number in range(image_inputs._MAX_FETCHING - 1):
            waiting.append(group.create_task(ask(f"{server}/slow{number}")))
            await slow.acquire()
        await ask(f"{server}/red")
        waiting.append(group.create_task(ask(f"{server}/slow")))
        await slow.acquire()
        await ask(data_url(png()))
        for each in waiting:
            each.cancel()


def saved(image: Image.Image, file_type: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, file_type, **options)
    return file.getvalue()


RAMP = Image.linear_gradient("L")  # black above, white below
PALETTE = RAMP.convert("P")
ORIENTED = Image.Exif()
ORIENTED[0x0112] = 1
DEEP = Image.frombytes("I;16", (256, 256), b"".join(bytes([0, y]) * 256 for y in range(256)))


@pytest.mark.parametrize(
    "file",
    {
        "two images in a JPEG": saved(RAMP, "MPO", save_all=True, append_images=[PALETTE.convert("RGB")]),
        "CMYK": saved(RAMP.convert("RGB").convert("CMYK"), "JPEG"),
        "EXIF": saved(RAMP, "JPEG", exif=ORIENTED),
        "animated WEBP": saved(RAMP, "WEBP", save_all=True, append_images=[RAMP.rotate(90)]),
        "animated PNG": saved(RAMP, "PNG", save_all=True, append_images=[RAMP.rotate(90)]),
        "a palette with transparency": saved(PALETTE, "PNG", transparency=bytes(range(256))),
        "16 bits": saved(DEEP, "PNG"),
    }.items(),
    ids=lambda file: file[0],
)
async def test_each_type_of_file_has_the_same_pixels(file: tuple[str, bytes]) -> None:
    [image] = await load(data_url(file[1]))
    for y in (0, 100, 200, 255):
        assert image.getpixel((9, y)) == pytest.approx((y, y, y), abs=8), file[0]


async def test_a_broken_file_is_fetched_again(server: str) -> None:
    fetch = image_loader(ImageConfig(1))
    with pytest.raises(InvalidRequestError, match="image 1 cannot be loaded"):
        (await fetch(images_at(f"{server}/changing")))()
    await asyncio.sleep(0)
    [image] = (await fetch(images_at(f"{server}/changing")))()
    assert image.size == (4, 3)


@pytest.mark.parametrize("path", ["/missing", "/slow", "/large", "/empty", "/text", *REDIRECTS])
async def test_what_a_server_does_not_give_is_the_clients_error(path: str, server: str) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(InvalidRequestError, match=r"image 2 cannot be loaded: .+"):
            await load(f"{server}/red", server + path)


@pytest.mark.parametrize(
    "url",
    [
        data_url(png()[:40]),
        data_url(b""),
        data_url(b"GIF89a" + bytes(50)),
        data_url(bomb(20_000)),
        data_url(png(), "text/plain"),
        "data:image/png;base64,***",
        "data:image/png," + "x" * 100_000,
        data_url(bytes(20 << 20)),
        "https://169.254.169.254/latest/meta-data",
        "https://localhost/a.png",
        "http://example.com/a.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "ftp://example.com/a.png",
        "",
    ],
    ids=lambda url: url[:40],
)
async def test_an_image_that_cannot_be_right_is_refused_in_a_short_sentence(url: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"image 1 cannot be loaded: .+") as refused:
        await load(url)
    assert len(str(refused.value)) < 300


async def test_a_bombs_pixels_are_never_decoded() -> None:
    with pytest.raises(InvalidRequestError, match="pixels"):
        await load(data_url(bomb(60_000)))
