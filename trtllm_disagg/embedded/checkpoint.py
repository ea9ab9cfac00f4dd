"""Is a checkpoint directory whole? Read from file names, sizes and headers, before anything big is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtllm_disagg.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: A header is JSON, a hundred bytes a tensor.
_MAX_HEADER_BYTES = 100_000_000


def check_checkpoint(directory: Path, vocab_size: int, *, any_dtype: bool) -> None:
    """Raises ConfigError for missing or truncated files, for weights of several dtypes unless `any_dtype`, and for
    a tokenizer that knows tokens which the model does not.
    """
    _check_shards(directory)
    dtypes: dict[str, str] = {}
    for path in _weight_files(directory):
        for name, tensor in _header(path).items():
            if str(tensor["dtype"]).startswith(("F", "BF")):
                dtypes.setdefault(tensor["dtype"], f"{name} in {path.name}")
    if len(dtypes) > 1 and not any_dtype:
        found = ", ".join(f"{dtype} ({where})" for dtype, where in dtypes.items())
        raise ConfigError(
            f"dtype: 'auto' is not allowed for {directory}, whose weights are of several: {found}; "
            "expected float32 or bfloat16, to which all are converted"
        )
    _check_tokenizer(directory / "tokenizer.json", vocab_size)


def fingerprint(directory: Path) -> str:
    """Over config.json and, of each weight file, its size and both ends (the start holds all names and shapes)."""
    hasher = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=16)
    for path in _weight_files(directory):
        size = path.stat().st_size
        with path.open("rb") as file:
            hasher.update(path.name.encode() + size.to_bytes(8, "little") + file.read(65536))
            file.seek(max(0, size - 65536))
            hasher.update(file.read())
    return hasher.hexdigest()


def weight_places(directory: Path) -> dict[str, str]:
    """Weight -> file, for a checkpoint that is whole. Empty when it has neither an index nor the usual one file."""
    if (directory / _INDEX).exists():
        return dict(read_json(directory / _INDEX)["weight_map"])
    file = directory / _SINGLE
    return dict.fromkeys(_header(file), file.name) if file.exists() else {}


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError unless it is a readable JSON object."""
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"model: {path} is not a JSON object")
    return loaded


def _weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _check_shards(directory: Path) -> None:
    if not _weight_files(directory):
        raise ConfigError(f"model: {directory} holds no *.safetensors file")
    index = directory / _INDEX
    if not index.exists():
        return
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"model: {index} has no weight_map from weights to files")
    shards = sorted(set(places.values()))
    if missing := [name for name in shards if not (directory / name).is_file()]:
        raise ConfigError(
            f"model: {directory} lacks {len(missing)} of the {len(shards)} files that {_INDEX} names: "
            f"{', '.join(missing[:3])}; copy them there"
        )


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> dtype, shape, data_offsets. Raises ConfigError when the file is not all there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ConfigError(f"model: {path} is truncated or no safetensors file: it ends within its header")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        end = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
        {tensor["dtype"] for tensor in header.values()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(f"model: {path} is no safetensors file: {error!r} in its header") from error
    if size != 8 + length + end:
        raise ConfigError(
            f"model: {path} has {size} bytes where its header tells of {8 + length + end}; copy it again"
        )
    return dict(header)


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    if not path.exists():
        return
    tokenizer = read_json(path)
    highest = max(_token_ids(tokenizer), default=0)
    if highest >= vocab_size:
        raise ConfigError(
            f"model: {path} knows token {highest}; vocab_size {vocab_size} of config.json allows at most "
            f"{vocab_size - 1}; use the tokenizer that belongs to the model"
        )


def _token_ids(tokenizer: dict[str, Any]) -> Iterator[int]:
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    yield from vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    yield from (token["id"] for token in tokenizer.get("added_tokens") or ())
