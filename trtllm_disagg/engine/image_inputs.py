"""Loads a request's images and makes an engine's inputs of them, with the names of TensorRT-LLM's LLM API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from trtllm_disagg.types import GenerateRequest, Images

log = logging.getLogger(__name__)

#: Decodes fetched images, as the engine takes them. Slow, for a thread. Raises InvalidRequestError.
Decode = Callable[[], Sequence[Any]]
#: Fetches the files of images. Raises InvalidRequestError.
Fetch = Callable[[Images], Awaitable[Decode]]
#: Requests that wait for servers, or have files from them.
_MAX_FETCHING = 64
#: Requests that decode at once: each may hold hundreds of megabytes until the engine has it.
_MAX_DECODING = 8
#: asyncio's own threads also wait for name servers.
_THREADS = ThreadPoolExecutor(_MAX_DECODING, "images")


def in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    return asyncio.get_running_loop().run_in_executor(_THREADS, work)


class ImageInputs:
    def __init__(self, fetch: Fetch, processor: Any) -> None:
        """`processor`: the LLM's `input_processor`; None: nothing counts an image's tokens before the engine does."""
        self._fetch = fetch
        self._processor = processor
        self._fetching = asyncio.Semaphore(_MAX_FETCHING)
        self._decoding = asyncio.Semaphore(_MAX_DECODING)

    @asynccontextmanager
    async def of(self, request: GenerateRequest, images: Images) -> AsyncIterator[dict[str, Any]]:
        """The inputs for `generate_async`, which must be called before the block ends. Raises InvalidRequestError."""
        are_here = all(each["Url"].startswith("data:") for each in images.references)
        server: AbstractAsyncContextManager[Any] = nullcontext() if are_here else self._fetching
        async with server:
            with request.span.child("load_images"):
                decode = await self._fetch(images)
            async with self._decoding:
                with request.span.child("decode_images"):
                    loaded = await in_thread(decode)
                yield self._inputs(request, images, loaded)

    def _inputs(self, request: GenerateRequest, images: Images, loaded: Sequence[Any]) -> dict[str, Any]:
        if (num_added := self._num_added(request.token_ids, loaded)) is not None:
            images.num_added = num_added
        inputs = {"prompt_token_ids": request.token_ids, "multi_modal_data": {"image": loaded}}
        if images.hashes:
            inputs["multi_modal_uuids"] = {"image": images.hashes}
        if images.processor_kwargs:
            inputs["mm_processor_kwargs"] = images.processor_kwargs
        return inputs

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
