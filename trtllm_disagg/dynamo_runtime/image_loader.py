"""Fetches images with Dynamo's loader, by its policy for addresses (`DYN_MM_*`), and decodes them."""

from __future__ import annotations

import asyncio
import logging
import warnings
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from trtllm_disagg.config.worker_config import ImageConfig
from trtllm_disagg.engine.image_inputs import Decode, Fetch
from trtllm_disagg.errors import ConfigError, InvalidRequestError
from trtllm_disagg.types import Images

#: A larger image is refused from its header: a small file can hold gigabytes of one colour.
_MAX_PIXELS = 50_000_000
_MAX_MESSAGE = 200
#: The longest wait for a server.
_SECONDS = 30.0
_PIECE = 1 << 20


def image_loader(config: ImageConfig) -> Fetch:
    """Raises ConfigError where a library is missing that Dynamo's loader imports."""
    try:
        from dynamo.common.http import HttpError
        from dynamo.common.http.url_validator import describe_media_source
        from dynamo.common.multimodal import image_loader
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            f"--enable-multimodal needs Dynamo's image loader, which needs {error.name}: "
            "pip install 'trtllm-disagg[images]'"
        ) from None
    # Pillow warns from its limit on, and refuses from twice the limit on.
    Image.MAX_IMAGE_PIXELS = _MAX_PIXELS // 2
    warnings.filterwarnings("ignore", module="PIL")
    # It logs whole addresses.
    logging.getLogger(image_loader.__name__).setLevel(logging.CRITICAL)
    loader = image_loader.ImageLoader(http_timeout=_SECONDS, max_bytes=config.max_file_size_mb << 20)
    # It returns and caches files then: pixels are large, and an image may wait for the server of the next one.
    loader._open_image = _content

    @contextmanager
    def refused(number: int, url: str) -> Iterator[None]:
        try:
            yield
        except (HttpError, ValueError, OSError) as error:
            why = str(error).replace(url, describe_media_source(url))[:_MAX_MESSAGE]
            raise InvalidRequestError(f"image {number} cannot be loaded: {why}") from None

    async def file_at(number: int, url: str, scope: str | None) -> Any:
        with refused(number, url):
            return url if url.startswith("data:") else await loader.load_image(url, cache_scope=scope)

    async def fetch(images: Images) -> Decode:
        urls, loop = [each["Url"] for each in images.references], asyncio.get_running_loop()
        fetching = (file_at(number, url, images.cache_scope) for number, url in enumerate(urls, 1))
        files = await asyncio.gather(*fetching)

        def decode() -> list[Any]:
            pictures = []
            for number, (url, file) in enumerate(zip(urls, files, strict=True), 1):
                with refused(number, url):
                    try:
                        pictures.append(_decoded(_content_of(file) if isinstance(file, str) else file))
                    except ValueError:  # the next request gets what the server has then
                        loop.call_soon_threadsafe(loader._image_cache.clear)
                        raise
            return pictures

        return decode

    return fetch


async def _content(file: BytesIO) -> bytes:
    return file.getvalue()


def _content_of(data_url: str) -> bytes:
    """Raises ValueError."""
    from dynamo.common.http.url_validator import max_data_url_bytes

    if len(data_url) > max_data_url_bytes():
        raise ValueError(f"its data URL is longer than {max_data_url_bytes()} bytes (DYN_MM_MAX_DATA_URL_MB)")
    head, _, data = data_url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ValueError("a data URL must begin with data:image/...;base64,")
    data = data.replace("\n", "").replace("\r", "")
    # In pieces, since Python's other threads wait while one is decoded.
    return b"".join(b64decode(data[at : at + _PIECE], validate=True) for at in range(0, len(data), _PIECE))


def _decoded(file: bytes) -> Any:
    """A PIL image. Raises ValueError."""
    from PIL import Image, UnidentifiedImageError

    try:
        image: Image.Image = Image.open(BytesIO(file), formats=("JPEG", "PNG", "WEBP"))
        if image.mode == "I;16":  # `convert` would make nearly all of it white
            image = image.point(lambda value: value / 256)
        return image.convert("RGB")
    except UnidentifiedImageError:
        raise ValueError("it is no JPEG, PNG or WEBP") from None
    except Exception as error:  # Pillow raises many types
        raise ValueError(str(error) or type(error).__name__) from None
