"""Loads images with Dynamo's loader, by Dynamo's policy for addresses (`DYN_MM_*`)."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Sequence
from typing import Any

from trtllm_disagg.config.worker_config import ImageConfig
from trtllm_disagg.engine.image_inputs import Load
from trtllm_disagg.errors import ConfigError, InvalidRequestError
from trtllm_disagg.types import Images

#: A larger image is refused from its header: a small file can hold gigabytes of one colour.
_MAX_PIXELS = 50_000_000
_MAX_MESSAGE = 200
#: The longest wait for a server.
_SECONDS = 30.0


def image_loader(config: ImageConfig) -> Load:
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
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    # It logs whole data URLs.
    logging.getLogger(image_loader.__name__).setLevel(logging.CRITICAL)
    loader = image_loader.ImageLoader(http_timeout=_SECONDS, max_bytes=config.max_file_size_mb << 20)
    wrong = (HttpError, ValueError, OSError, Image.DecompressionBombError)

    async def load(images: Images) -> Sequence[Any]:
        urls = [each["Url"] for each in images.references]
        loading = (loader.load_image(url, cache_scope=images.cache_scope) for url in urls)
        loaded = await asyncio.gather(*loading, return_exceptions=True)
        for number, (url, each) in enumerate(zip(urls, loaded, strict=True), 1):
            if isinstance(each, wrong):
                why = str(each).replace(url, describe_media_source(url))[:_MAX_MESSAGE]
                raise InvalidRequestError(f"image {number} cannot be loaded: {why}") from None
            if isinstance(each, BaseException):
                raise each
        return loaded

    return load
