"""Images in a prompt's tokens: what tells two images of the same length apart.

An image fills `num_tokens` positions. In a request's tokens each has a virtual id, made of the image's content, so that
keys, digests and transfers of text serve images too. 31 bits may collide; so whatever finds KV by content (block keys,
starts of blocks) also gets the whole digest. Models, events and clients see the model's image token instead.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from trtllm_disagg.engines.embedded.ipc.messages import PlacedImage

#: The lowest virtual id, above every vocabulary; all fit into 32 bits.
FIRST_VIRTUAL = 1 << 31


def virtual_ids(digest: bytes, count: int) -> list[int]:
    """An id for each position of the image."""
    numbers = struct.unpack(f"<{count}I", hashlib.shake_128(digest).digest(4 * count))
    return [number | FIRST_VIRTUAL for number in numbers]


class Part(NamedTuple):
    """The part of an image within a run of tokens: of its positions, those from `offset` on."""

    image: PlacedImage
    offset: int
    #: The part's place in the run.
    begin: int
    end: int


def parts_of(images: Seq[PlacedImage], begin: int, end: int) -> Seq[Part]:
    """The parts of images at the positions from `begin` to `end`."""
    if not images:
        return ()
    return [
        Part(each, max(0, begin - each.start), max(each.start, begin) - begin, min(each.end, end) - begin)
        for each in images
        if each.start < end and begin < each.end
    ]


def mm_key(part: Part) -> dict[str, Any]:
    """What an event has of an image in a block, as in TensorRT-LLM."""
    name = part.image.uuid or part.image.digest.hex()
    return {"type": "mm_key", "hash": name, "start_offset": part.offset}


def wide_ids(tokens: Seq[int], parts: Seq[Part]) -> Seq[int]:
    """The tokens with ids for images that hold the whole digest."""
    if not parts:
        return tokens
    wide = list(tokens)
    for part in parts:
        first = int.from_bytes(part.image.digest) << 32 | part.offset
        wide[part.begin : part.end] = range(first, first + part.end - part.begin)
    return wide


def real_ids(tokens: Seq[int], parts: Seq[Part]) -> list[int]:
    """The tokens with the model's image token for images."""
    real = list(tokens)
    for part in parts:
        real[part.begin : part.end] = [part.image.token_id] * (part.end - part.begin)
    return real
