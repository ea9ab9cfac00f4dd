"""Images in a prompt, as TensorRT-LLM's input processors take them: one marker each, which becomes many image tokens.

Answers and block keys are made of a prompt's contents: numbers of each image's digest in place of its tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import struct
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trtllm_disagg.engines.embedded.params.request_params import DisaggregatedParams
from trtllm_disagg.engines.recording.hard_edges import RequestError

#: The marker of a model without a config.json here; Llava's.
IMAGE_TOKEN = 32_000
#: Above all token ids.
_FIRST_CONTENT = 1 << 31
_MAX_SHARED = 256


class Image(NamedTuple):
    #: As in `multimodal_hashes`: 8 signed 32-bit numbers.
    digest: list[int]
    uuid: str | None = None

    @property
    def name(self) -> str:
        """In KV events."""
        return self.uuid or struct.pack(">8i", *self.digest).hex()


Images = Sequence[Image]


def images_of(inputs: object) -> Images:
    """Raises ValueError for a broken image, and for one uuid too many or too few."""
    given = inputs if isinstance(inputs, Mapping) else {}
    images = (given.get("multi_modal_data") or {}).get("image") or ()
    uuids = (given.get("multi_modal_uuids") or {}).get("image") or [None] * len(images)
    if len(uuids) != len(images):
        raise ValueError(f"{len(uuids)} multi_modal_uuids for {len(images)} images")
    return [Image(_digest(image), uuid) for image, uuid in zip(images, uuids, strict=True)]


def _digest(image: Any) -> list[int]:
    if getattr(image, "mode", None) != "RGB":
        raise ValueError(f"{type(image).__name__} is not an image; expected a PIL.Image.Image with mode RGB")
    digest = hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()
    return list(struct.unpack(">8i", digest))


def are_of(contents: Sequence[int], prompt: Sequence[int]) -> bool:
    """Whether they are equal but for images."""
    pairs = zip(contents, prompt, strict=False)
    return len(contents) == len(prompt) and all(n == token or n >= _FIRST_CONTENT for n, token in pairs)


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """`LLM.input_processor` (inputs/registry.py)."""

    #: -1: the model takes no images.
    image_token: int
    tokens_per_image: int
    #: Image tokens have positions of their own, as in Qwen-VL.
    has_mrope: bool = False

    @classmethod
    def of_model(cls, model: object, tokens_per_image: int) -> InputProcessor:
        try:
            config = json.loads((Path(str(model)) / "config.json").read_text())
        except (OSError, ValueError):
            return cls(IMAGE_TOKEN, tokens_per_image)
        token = config.get("image_token_id", config.get("image_token_index", -1))
        return cls(token, tokens_per_image, "mrope_section" in json.dumps(config))

    def get_num_tokens_per_image(self, *, image: Any, **_: Any) -> int:
        return self.tokens_per_image

    def get_mm_token_ids(self) -> list[int] | None:
        return None if self.image_token < 0 else [self.image_token]

    def retokenised(self, prompt: list[int]) -> list[int]:
        """As from its text: the two tokens after the last marker have become one."""
        end = len(prompt) - [*reversed(prompt), self.image_token].index(self.image_token)
        return prompt[:end] + [sum(prompt[end : end + 2])][: len(prompt) - end] + prompt[end + 2 :]

    def expanded(self, prompt: list[int], num_images: int) -> list[int]:
        """Raises ValueError unless the prompt has one marker for each image."""
        if (count := prompt.count(self.image_token)) != num_images:
            raise ValueError(f"{count} image markers ({self.image_token}) for {num_images} images")
        runs = ([token] * (self.tokens_per_image if token == self.image_token else 1) for token in prompt)
        return list(itertools.chain.from_iterable(runs))

    def contents(self, expanded: list[int], images: Images) -> list[int]:
        if not images:
            return expanded
        numbers = iter(self._parts(images))
        return [next(numbers, token) if token == self.image_token else token for token in expanded]

    def _parts(self, images: Images) -> dict[int, tuple[str, int]]:
        """For each image token its content: the image's name, and the token's place in it."""
        return {
            _FIRST_CONTENT | zlib.crc32(struct.pack(">i8i", at, *image.digest), order): (image.name, at)
            for order, image in enumerate(images)
            for at in range(self.tokens_per_image)
        }

    def name_images(self, event: dict[str, Any], images: Images) -> dict[str, Any]:
        """The event of blocks of contents, with image tokens and `mm_keys`."""
        parts = self._parts(images)
        for stored in event["data"].get("blocks", ()):
            for at, token in enumerate(stored["tokens"]):
                if part := parts.get(token["token_id"]):
                    token["token_id"] = self.image_token
                    if at == 0 or part[1] == 0:
                        key = {"type": "mm_key", "hash": part[0], "start_offset": part[1]}
                        stored.setdefault("mm_keys", []).append(key)
        return event

    def add_positions(self, params: DisaggregatedParams, expanded: list[int]) -> None:
        """Of a model with mrope, into the caller's parameters (llmapi/llm.py `_preprocess`)."""
        import torch  # for such a model only

        steps = torch.tensor([token != self.image_token for token in expanded], dtype=torch.int32)
        deltas = (steps - 1).sum(dtype=torch.int32).view(1, 1)
        ids = steps.cumsum(0, dtype=torch.int32).expand(3, 1, -1)
        params.mrope_position_ids_handle = SharedTensorContainer.from_tensor(ids).dump_to_dict()
        params.mrope_position_deltas_handle = SharedTensorContainer.from_tensor(deltas).dump_to_dict()

    def check_positions(self, params: DisaggregatedParams, expanded: list[int]) -> None:
        """Raises RequestError for a decode of images that lacks their positions, or has others."""
        if not self.has_mrope or self.image_token not in expanded:
            return
        handles = params.mrope_position_ids_handle, params.mrope_position_deltas_handle
        try:
            ids, deltas = (SharedTensorContainer.from_dict(each or {}).get_local_view() for each in handles)
        except (KeyError, RuntimeError) as error:
            raise RequestError(f"mrope_config: {error}") from error
        if (ids.shape[-1], deltas.tolist()) != (len(expanded), [[-expanded.count(self.image_token)]]):
            raise RequestError("mrope_config: positions of another prompt")


class SharedTensorContainer(NamedTuple):
    """A tensor in its host's memory, by the name of a file (_torch/shared_tensor/shared_tensor.py)."""

    name: str

    @classmethod
    def from_tensor(cls, tensor: Any) -> SharedTensorContainer:
        made = cls(f"/torch_{secrets.token_hex(8)}")
        HOST_MEMORY[made.name] = tensor
        if len(HOST_MEMORY) > _MAX_SHARED:
            del HOST_MEMORY[next(iter(HOST_MEMORY))]
        return made

    @classmethod
    def from_dict(cls, tensor_info: Mapping[str, Any]) -> SharedTensorContainer:
        return cls(b64decode(tensor_info["storage_handle"]).decode())

    def get_local_view(self) -> Any:
        """Raises RuntimeError on another host."""
        if self.name not in HOST_MEMORY:
            raise RuntimeError(
                f"unable to open shared memory object <{self.name}>: No such file or directory (2)"
            )
        return HOST_MEMORY[self.name]

    def dump_to_dict(self) -> dict[str, Any]:
        tensor = self.get_local_view()
        return {
            "method_key": 2,  # a CPU tensor
            "tensor_size": list(tensor.shape),
            "tensor_stride": list(tensor.stride()),
            "tensor_storage_offset": 0,
            "storage_dtype": str(tensor.dtype),
            "storage_size": tensor.numel(),
            "storage_handle": b64encode(self.name.encode()).decode(),
            "manager_handle": b64encode(b"/tmp/torch-shm/manager.sock").decode(),
        }


#: Shared tensors by name, the newest; this process counts as a host.
HOST_MEMORY: dict[str, Any] = {}
