"""Finds a model's directory: the named one, or the one in the Hugging Face cache."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from trtllm_disagg.errors import ConfigError

FLAG = "--model"
#: The files that a worker reads of a hub repository.
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt")
#: Dynamo's frontend needs one of these to tokenize.
_TOKENIZERS = ("tokenizer.json", "tiktoken.model", "*.tiktoken")
#: Names that the hub's client accepts.
_HUB_NAME = re.compile(
    r"(?!.*(--|\.\.))(?!.*\.git$)[A-Za-z0-9]([\w.-]{0,94}\w)?/[A-Za-z0-9]([\w.-]{0,94}\w)?", re.ASCII
)
#: Seconds for the hub's first answer. The download has no limit, and shows its progress.
_REACH_SECONDS = 20.0

Answer = TypeVar("Answer")


def is_hub_name(model: str) -> bool:
    """True for `organisation/name` that is neither an existing path nor a path in an existing directory."""
    is_path = os.path.exists(model) or os.path.isdir(os.path.dirname(model))
    return _HUB_NAME.fullmatch(model) is not None and not is_path


def model_directory(model: str, key: str = FLAG, revision: str | None = None) -> Path:
    """A model's directory. A model that only the hub has is downloaded first, with progress on stderr.

    A path is returned unchecked; it has no `revision`. Raises ConfigError, naming `key`, for a model that neither the
    cache nor the hub has.
    """
    if not is_hub_name(model):
        if revision is not None:
            revision_key = "--revision" if key == FLAG else "revision"
            raise ConfigError.bad_value(revision_key, revision, f"no value with the directory {model}")
        return Path(model)
    cached = _snapshot(model, revision)
    if cached is not None and is_complete(cached):
        return cached
    return _download(model, key, cached, revision)


def servable_model(model: str, revision: str | None = None) -> Path:
    """As `model_directory`. Also raises ConfigError for a missing directory, or one without model or tokenizer."""
    directory = Path(os.path.expanduser(model_directory(model, FLAG, revision)))
    # os.path returns False where Path raises, as for names that are too long.
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
    """Accepts a missing file."""
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
    """The model's directory in the local cache, if the cache has its configuration. Does not use the network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def is_complete(directory: Path) -> bool:
    """Whether all weight files exist: those in the index, or any without an index."""
    import json

    index = directory / "model.safetensors.index.json"
    try:
        listed = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {"weight_map": {}}
        shards = set(listed["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True  # the engine reports a bad index
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
        raise ConfigError(f"{key}: {has_not}, and HF_HUB_OFFLINE forbids asking the hub; unset it, {remedy}")
    at = constants.ENDPOINT
    print(f"{has_not}; asking {at}", file=sys.stderr, flush=True)
    try:
        api = HfApi(endpoint=at)
        _within(_REACH_SECONDS, lambda: api.model_info(name, revision=revision, timeout=_REACH_SECONDS / 2))
        files = list(_FILES)
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, endpoint=at))
    except Exception as error:  # the HTTP library and the hub's client have no common base class
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{key}: {has_not}, and {at} does not give it ({why}); {remedy}") from None


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Call `ask` in a thread, since resolving host names has no timeout. Raises TimeoutError."""
    answer: Future[Answer] = Future()

    def settle() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=settle, name="hub", daemon=True).start()
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer.result()


def fingerprint(directory: Path) -> str:
    """Hash of config.json and each weight file's size and both ends (the start has all names and shapes)."""
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
