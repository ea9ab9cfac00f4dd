"""Loads a request's images and makes an engine's inputs of them, with the names of TensorRT-LLM's LLM API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from trtllm_disagg.types import GenerateRequest, Images

log = logging.getLogger(__name__)

#: Loads images, as the engine takes them. Raises InvalidRequestError.
Load = Callable[[Images], Awaitable[Sequence[Any]]]
#: Requests that load at once: each may hold hundreds of megabytes until the engine has it.
_MAX_LOADING = 8


class ImageInputs:
    def __init__(self, load: Load, processor: Any) -> None:
        """`processor`: the LLM's `input_processor`; None: nothing counts an image's tokens before the engine does."""
        self._load = load
        self._processor = processor
        self._room = asyncio.Semaphore(_MAX_LOADING)

    @asynccontextmanager
    async def of(self, request: GenerateRequest, images: Images) -> AsyncIterator[dict[str, Any]]:
        """The inputs for `generate_async`, which must be called before the block ends. Raises InvalidRequestError."""
        async with self._room:
            with request.span.child("load_images"):
                loaded = await self._load(images)
            if (num_added := self._num_added(request.token_ids, loaded)) is not None:
                images.num_added = num_added
            inputs = {"prompt_token_ids": request.token_ids, "multi_modal_data": {"image": loaded}}
            if images.hashes:
                inputs["multi_modal_uuids"] = {"image": images.hashes}
            if images.processor_kwargs:
                inputs["mm_processor_kwargs"] = images.processor_kwargs
            yield inputs

    def _num_added(self, token_ids: list[int], loaded: Sequence[Any]) -> int | None:
        if self._processor is None:
            return None
        try:
            markers = {int(each) for each in self._processor.get_mm_token_ids()}
            counts = [int(self._processor.get_num_tokens_per_image(image=each)) for each in loaded]
        except Exception as error:  # of any model's processor: the engine counts then
            log.debug("the tokens of images are not counted: %s", error)
            return None
        return sum(counts) - sum(token in markers for token in token_ids)
