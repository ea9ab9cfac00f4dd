"""A request's images: checked, and put into its prompt. Prefill gets pixels; decode gets only their digests."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trtllm_disagg.engines.embedded.ipc.messages import ImageTokens, Pixels, PlacedImage
from trtllm_disagg.engines.embedded.kv_cache import virtual_ids as kv_images

#: Keys of `inputs` that are read here.
INPUTS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
#: Of all images of a request: the engine core's socket buffers them.
MAX_PIXEL_BYTES = 64 << 20
#: Of the longer side to the shorter: the processor first scales the shorter one to the tower's size.
MAX_ASPECT_RATIO = 200
#: An image's digest in `multimodal_hashes`, as TensorRT-LLM writes it.
_HASH = struct.Struct(">8i")


class Picture(NamedTuple):
    """An image of a request. `pixels` is None on decode."""

    digest: bytes
    pixels: Pixels | None = None
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class PromptWithImages:
    #: With the model's image token at the images' places, and with virtual ids there (kv_cache/virtual_ids.py).
    token_ids: list[int]
    virtual_ids: list[int]
    images: list[PlacedImage] = field(default_factory=list)
    pixels: list[Pixels] = field(default_factory=list)

    @property
    def hashes(self) -> list[list[int]] | None:
        """`multimodal_hashes` of the handoff."""
        return [list(_HASH.unpack(image.digest)) for image in self.images] or None


class InputProcessor:
    """The part of TensorRT-LLM's input processor that Dynamo's worker calls."""

    def __init__(self, tokens: ImageTokens) -> None:
        self._tokens = tokens

    def get_num_tokens_per_image(self, *, image: Any, **_: Any) -> int:
        """The same for all images."""
        return self._tokens.num_tokens

    def get_mm_token_ids(self) -> list[int]:
        return [self._tokens.token_id]


def place_images(
    prompt: list[int], inputs: Any, hashes: Any, kind: str, tokens: ImageTokens | None
) -> PromptWithImages:
    """The prompt with its images. `inputs` and `hashes` (`multimodal_hashes`) are the client's; `kind`: the request
    type; `tokens`: None for a model that takes no images.

    Raises ValueError for images that do not fit the prompt or the model, NotImplementedError for an unserved input.
    """
    given = _pictures_in(inputs if isinstance(inputs, dict) else {})
    if tokens is None:
        if given or hashes:
            raise ValueError("this model takes no images")
        return PromptWithImages(prompt, prompt)
    if kind != "generation_only":
        if hashes:
            raise ValueError(f"multimodal_hashes belong to a generation_only request, not to a {kind} one")
        return _expanded(prompt, given, tokens)
    if given:
        raise ValueError("a generation_only request takes no images: multimodal_hashes say which ones it has")
    return _placed(prompt, [Picture(digest) for digest in _digests(hashes)], tokens)


def with_pictures(inputs: Any) -> Any:
    """The inputs with each image as a Picture: 0.1 s for 9 megapixels."""
    pictures = _pictures_in(inputs if isinstance(inputs, dict) else {})
    return inputs | {"multi_modal_data": {"image": pictures}} if pictures else inputs


# -- what the client gave


def _pictures_in(inputs: dict[str, Any]) -> list[Picture]:
    data, uuids = (inputs.get(name) or {} for name in ("multi_modal_data", "multi_modal_uuids"))
    if not isinstance(data, dict) or not isinstance(uuids, dict):
        raise ValueError("multi_modal_data and multi_modal_uuids must be dicts, such as {'image': [...]}")
    if inputs.get("mm_processor_kwargs"):
        raise NotImplementedError("mm_processor_kwargs are not served by the embedded engine")
    if others := sorted(name for name, value in data.items() if value and name != "image"):
        raise NotImplementedError(f"multi_modal_data.{others[0]} is not served by the embedded engine")
    images, names = data.get("image") or [], uuids.get("image") or []
    if not isinstance(images, list) or not isinstance(names, list):
        raise ValueError("multi_modal_data.image and multi_modal_uuids.image must be lists")
    if names and len(names) != len(images):
        raise ValueError(f"multi_modal_uuids has {len(names)} names for {len(images)} images")
    if images and isinstance(images[0], Picture):
        return images
    if not all(name is None or (isinstance(name, str) and name.isascii()) for name in names):
        raise ValueError(f"multi_modal_uuids has {names!r}; expected ASCII strings")
    pictures, left = [], MAX_PIXEL_BYTES
    for i, (image, name) in enumerate(zip(images, names or [None] * len(images), strict=True), 1):
        pixels = _pixels_of(image, i, left)
        left -= len(pixels.data)
        pictures.append(Picture(_digest(pixels), pixels, name or ""))
    return pictures


def _pixels_of(image: Any, number: int, max_bytes: int) -> Pixels:
    from PIL.Image import Image

    if not isinstance(image, Image):
        raise ValueError(f"image {number} is a {type(image).__name__}; expected a PIL.Image.Image")
    width, height = image.size
    size = f"image {number} has {width} x {height} pixels"
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(f"{size}; one side may be at most {MAX_ASPECT_RATIO} times the other")
    if 3 * width * height > max_bytes:
        raise ValueError(f"{size}; a request's images may have {MAX_PIXEL_BYTES // 3} in all")
    try:
        data = (image if image.mode == "RGB" else image.convert("RGB")).tobytes()
    except Exception as error:  # a file that PIL decodes only now: it raises many types
        raise ValueError(f"image {number} cannot be read: {error}") from None
    return Pixels(width, height, data)


def _digest(pixels: Pixels) -> bytes:
    # The size, too: images of the same bytes may have different ones.
    size = struct.pack("<II", pixels.width, pixels.height)
    return hashlib.sha256(size + hashlib.sha256(pixels.data).digest()).digest()


def _digests(hashes: Any) -> list[bytes]:
    try:
        return [_HASH.pack(*each) for each in hashes or ()]
    except (TypeError, struct.error):
        raise ValueError("multimodal_hashes must hold eight signed 32-bit numbers per image") from None


# -- into the prompt


def _expanded(prompt: list[int], pictures: Sequence[Picture], tokens: ImageTokens) -> PromptWithImages:
    """Each marker becomes an image's tokens."""
    if (count := prompt.count(tokens.token_id)) != len(pictures):
        marker = f"image tokens (id {tokens.token_id})"
        raise ValueError(f"the prompt has {count} {marker}, and the request {len(pictures)} images")
    if not pictures:
        return PromptWithImages(prompt, prompt)
    expanded: list[int] = []
    for token in prompt:
        expanded += [token] * (tokens.num_tokens if token == tokens.token_id else 1)
    return _placed(expanded, pictures, tokens)


def _placed(prompt: list[int], pictures: Sequence[Picture], tokens: ImageTokens) -> PromptWithImages:
    """`prompt` has each image's tokens."""
    starts = list(_starts(prompt, tokens))
    if len(starts) != len(pictures):
        named = f"multimodal_hashes name {len(pictures)} images, and the prompt has {len(starts)}"
        raise ValueError(f"the handoff belongs to another prompt: {named}")
    virtual, images = prompt.copy(), []
    for start, picture in zip(starts, pictures, strict=True):
        end = start + tokens.num_tokens
        virtual[start:end] = kv_images.virtual_ids(picture.digest, tokens.num_tokens)
        images.append(PlacedImage(start, tokens.num_tokens, tokens.token_id, picture.digest, picture.uuid))
    pixels = [picture.pixels for picture in pictures if picture.pixels is not None]
    return PromptWithImages(prompt, virtual, images, pixels)


def _starts(prompt: list[int], tokens: ImageTokens) -> Iterator[int]:
    """Where the images begin: a run of image tokens is one or several whole images."""
    at = 0
    while tokens.token_id in itertools.islice(prompt, at, None):
        at = prompt.index(tokens.token_id, at)
        if prompt[at : at + tokens.num_tokens] != [tokens.token_id] * tokens.num_tokens:
            run = f"a run of image tokens (id {tokens.token_id})"
            raise ValueError(f"the prompt has {run} that is not whole images of {tokens.num_tokens}")
        yield at
        at += tokens.num_tokens
