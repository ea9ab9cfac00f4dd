"""Finds a model's directory: the one that was named, or the one in the Hugging Face cache."""

from __future__ import annotations

import hashlib
import os
import queue
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trtllm_disagg.errors import ConfigError

FLAG = "--model"
#: The files of a hub repository that a worker reads.
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt")
#: Dynamo's frontend needs one of these to make tokens.
_TOKENIZERS = ("tokenizer.json", "tiktoken.model", "*.tiktoken")
#: The names that the hub's client does not refuse.
_HUB_NAME = re.compile(
    r"(?!.*(--|\.\.))(?!.*\.git$)[A-Za-z0-9]([\w.-]{0,94}\w)?/[A-Za-z0-9]([\w.-]{0,94}\w)?", re.ASCII
)
#: The limit for the hub's first answer. The download after it has no limit, and shows its progress.
_REACH_SECONDS = 20.0

Answer = TypeVar("Answer")


def is_hub_name(model: str) -> bool:
    """True for `organisation/name` that is neither an existing path nor a path in an existing directory."""
    is_path = os.path.exists(model) or os.path.isdir(os.path.dirname(model))
    return _HUB_NAME.fullmatch(model) is not None and not is_path


def model_directory(model: str, key: str = FLAG, revision: str | None = None) -> Path:
    """The directory of a model. One that only the hub has is downloaded first, with its progress on stderr.

    A path is returned unchecked; it has no `revision`. Raises ConfigError, which names `key`, for a model that is
    neither in the cache nor available from the hub.
    """
    if not is_hub_name(model):
        if revision is not None:
            revision_key = "--revision" if key == FLAG else "revision"
            raise ConfigError.bad_value(revision_key, revision, f"no value with the directory {model}")
        return Path(model)
    cached = _snapshot(model, revision)
    if cached is not None and _is_complete(cached):
        return cached
    return _download(model, key, cached, revision)


def servable_model(model: str, revision: str | None = None) -> Path:
    """As `model_directory`. Raises ConfigError, too, for a directory that is missing, no model, or has no tokenizer."""
    directory = Path(os.path.expanduser(model_directory(model, FLAG, revision)))
    # os.path returns False where Path raises, for example for names that are too long.
    if not os.path.isdir(directory):
        allowed = "a directory that exists, or the name of a model on the Hugging Face hub, ORGANISATION/NAME"
        raise ConfigError.bad_value(FLAG, model, allowed)
    if not (directory / "config.json").is_file():
        raise ConfigError.bad_value(FLAG, str(directory), "a directory with config.json in it")
    if not any(any(directory.glob(pattern)) for pattern in _TOKENIZERS):
        makes = "from which Dynamo's frontend makes tokens; add the one that belongs to this model"
        raise ConfigError.bad_value(FLAG, str(directory), f"a directory with tokenizer.json, {makes}")
    _require_json_object(directory / "tokenizer_config.json", directory)
    return directory


def _require_json_object(file: Path, model: Path) -> None:
    """Of a file that need not be there."""
    import json

    try:
        why = "" if isinstance(json.loads(file.read_text(encoding="utf-8")), dict) else "it is no JSON object"
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError) as error:
        why = str(error)
    if why:
        allowed = f"a directory with a {file.name} that can be read ({why})"
        raise ConfigError.bad_value(FLAG, str(model), allowed)


def _snapshot(name: str, revision: str | None) -> Path | None:
    """The model's directory in the local cache, if that has its configuration. Does not use the network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _is_complete(directory: Path) -> bool:
    """Whether all weight files are there: those that an index lists, or any without an index."""
    import json

    index = directory / "model.safetensors.index.json"
    try:
        listed = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {"weight_map": {}}
        shards = set(listed["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True  # the engine reports what is wrong with the index
    if shards:
        return all((directory / shard).exists() for shard in shards)
    return any(directory.glob("*.safetensors"))


def _download(name: str, key: str, cached: Path | None, revision: str | None) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download

    called = name if revision is None else f"{name} at revision {revision}"
    found = f"only a part of it, in {cached}" if cached is not None else f"no {called}"
    has_not = f"the Hugging Face cache {constants.HF_HUB_CACHE} has {found}"
    wanted = "" if revision is None else f" --revision {revision}"
    remedy = f"run `hf download {name}{wanted}` where the hub can be reached, or name a directory"
    if constants.is_offline_mode():
        raise ConfigError(f"{key}: {has_not}, and HF_HUB_OFFLINE forbids to ask the hub; unset it, {remedy}")
    at = constants.ENDPOINT
    print(f"{has_not}; asking {at}", file=sys.stderr, flush=True)
    try:
        api = HfApi(endpoint=at)
        _within(_REACH_SECONDS, lambda: api.model_info(name, revision=revision, timeout=_REACH_SECONDS / 2))
        files = list(_FILES)
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, endpoint=at))
    except Exception as error:  # errors of the HTTP library and of the hub's client have no common base class
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{key}: {has_not}, and {at} does not give it ({why}); {remedy}") from None


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Call `ask` in a thread, and raise TimeoutError when it is late: resolving host names has no timeout."""
    answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put(ask())
        except Exception as error:
            answers.put(error)

    threading.Thread(target=answer, name="hub", daemon=True).start()
    try:
        got = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if isinstance(got, Exception):
        raise got
    return got


def fingerprint(directory: Path) -> str:
    """Over config.json and, of each weight file, its size and both ends (the start holds all names and shapes)."""
    try:
        hasher = hashlib.blake2b((directory / "config.json").read_bytes(), digest_size=16)
        for path in sorted(directory.glob("*.safetensors")):
            size = path.stat().st_size
            with path.open("rb") as file:
                hasher.update(path.name.encode() + size.to_bytes(8, "little") + file.read(65536))
                file.seek(max(0, size - 65536))
                hasher.update(file.read())
    except OSError as error:
        raise ConfigError(f"model: cannot read {directory}: {error}") from error
    return hasher.hexdigest()
