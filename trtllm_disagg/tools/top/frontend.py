"""Reads a frontend over HTTP: models, instances, and how it answered a request."""

from __future__ import annotations

import asyncio
import json
import random
import re
import string
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil

from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.handlers.trace import ENGINE_DATA
from trtllm_disagg.tools.up.http import address_here, ask, prompts

#: Tokens per answer: one of prefill and some of decode.
_NUM_TOKENS = 4
#: Min blocks per prompt.
_NUM_BLOCKS = 4
_PAGE_SECONDS = 5.0
#: Max letters per prompt, whatever block size the frontend reports.
_MAX_LETTERS = 1 << 14
#: Raised for invalid or unexpected JSON.
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, KeyError, TypeError, AttributeError)


class Instance(msgspec.Struct, frozen=True):
    """A worker's endpoint in discovery."""

    component: str
    endpoint: str
    instance_id: int


class AnswerTrace(msgspec.Struct, frozen=True):
    """The trace that workers add to an answer (handlers/trace.py)."""

    strategy: str = ""
    reason: str = ""
    fallbacks: list[str] = []
    prefill_instance: str | None = None
    decode_instance: str | None = None
    #: None: not measured.
    kv_transfer_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    prompt_tokens: int
    cached_tokens: int
    #: Share of the prompt's blocks that the router found on the worker; None without KV routing.
    hit_rate: float | None
    #: Workers chosen by the frontend; equal unless it chains the stages itself.
    prefill_worker: int | None
    decode_worker: int | None
    #: None for other projects' workers.
    trace: AnswerTrace | None


class ProbeFailedError(DisaggError):
    """The deployment did not answer a request."""

    category = "Unavailable"
    status = 503


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model; None: the frontend does not report it."""

    block_size: int | None = None
    context_length: int | None = None


def fresh_prompt(sizes: Sizes) -> str:
    """A new prompt of at least _NUM_BLOCKS blocks, if the model has room. Its letters are one token each in most
    tokenizers, and at most two.
    """
    count = min((_NUM_BLOCKS + 1) * (sizes.block_size or 32), _MAX_LETTERS)
    if sizes.context_length is not None:
        count = max(1, min(count, (sizes.context_length - _NUM_TOKENS) // 2))
    return " ".join(random.choices(string.ascii_lowercase, k=count))


class FrontendClient:
    def __init__(self, url: str, seconds: float) -> None:
        """`seconds`: timeout per answer. Raises ConfigError for an invalid URL."""
        try:
            parts = urlsplit(url)
            is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # an invalid port
            is_whole = False
        if not is_whole:
            raise ConfigError.bad_value("--url", url, "the URL of a frontend, as in http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._seconds = seconds

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    def models(self) -> list[str]:
        """Raises ConfigError without a frontend."""
        try:
            return _names(json.loads(self._page("/v1/models")))
        except OSError as error:
            allowed = f"the URL of a frontend that answers ({error})"
            raise ConfigError.bad_value("--url", self.url, allowed) from error
        except _UNREADABLE as error:
            raise ConfigError.bad_value(
                "--url", self.url, "the URL of a frontend; this server lists no models"
            ) from error

    def instances(self) -> list[Instance] | None:
        """None if the frontend does not list instances."""
        try:
            listed = json.loads(self._page("/health")).get("instances")
            return msgspec.convert(listed, list[Instance] | None)
        except (OSError, *_UNREADABLE):
            return None

    def sizes(self, model: str) -> Sizes:
        try:
            page = self._page("/metrics").decode(errors="replace")
        except OSError:
            return Sizes()
        return Sizes(
            _number(page, "dynamo_frontend_model_kv_cache_block_size", model),
            _number(page, "dynamo_frontend_model_context_length", model),
        )

    def ask(self, model: str, prompt: str, annotations: tuple[str, ...] = ()) -> Answer:
        """Raises ProbeFailedError."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": _NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "nvext": {
                "extra_fields": ["engine_data", "worker_id", "timing"],
                "annotations": list(annotations),
            },
        }
        for path, own in prompts(prompt).items():
            try:
                status, answer = asyncio.run(ask(self.url + path, self._seconds, body | own))
                if status == HTTPStatus.OK:
                    return answer_of(answer)
            except (OSError, *_UNREADABLE) as error:
                raise ProbeFailedError(str(error)) from error
            if status != HTTPStatus.NOT_FOUND:
                break
        raise ProbeFailedError(f"{status}: {_message(answer)}")

    def _page(self, path: str) -> bytes:
        """Raises OSError."""
        status, page = asyncio.run(ask(self.url + path, _PAGE_SECONDS))
        if status != HTTPStatus.OK:
            raise OSError(f"HTTP {status}")
        return page


def answer_of(body: bytes) -> Answer:
    """Raises one of _UNREADABLE if this is no completion."""
    said = json.loads(body)
    usage, nvext = said.get("usage") or {}, said.get("nvext") or {}
    workers = nvext.get("worker_id") or {}
    found = {
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        "hit_rate": (nvext.get("timing") or {}).get("kv_hit_rate"),
        "prefill_worker": workers.get("prefill_worker_id"),
        "decode_worker": workers.get("decode_worker_id"),
        "trace": (nvext.get("engine_data") or {}).get(ENGINE_DATA),
    }
    return msgspec.convert(found, Answer)


def _names(listed: Any) -> list[str]:
    """Raises one of _UNREADABLE if this is no list of models, or a name is not printable."""
    names = [str(each["id"]) for each in listed["data"]]
    if not all(map(str.isprintable, names)):
        raise ValueError("a name with control characters")
    return names


def _number(page: str, metric: str, model: str) -> int | None:
    found = re.search(rf'^{metric}{{model="{re.escape(model)}"}} (\d{{1,15}})\b', page, re.MULTILINE)
    return int(found[1]) or None if found else None


def _message(body: bytes) -> str:
    """The message of Dynamo's frontend, else the start of the body."""
    try:
        return str(json.loads(body)["message"])
    except _UNREADABLE:
        return body.decode(errors="replace")[:200]


def environ_of_listener(host: str, port: int) -> Mapping[str, str]:
    """Environment of this user's process that listens at the port; empty for other users and machines."""
    addresses = {address_here(host), "0.0.0.0", "::"} - {None}
    if len(addresses) == 2:
        return {}
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status != psutil.CONN_LISTEN or not each.laddr or each.pid is None:
                continue
            if each.laddr.port == port and each.laddr.ip in addresses:
                return dict(psutil.Process(each.pid).environ())
    return {}
