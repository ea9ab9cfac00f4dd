"""Reads a frontend over HTTP: its models, its instances, and how it answered a request."""

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
from trtllm_disagg.tools.up.http import address_here, ask

#: Tokens of an answer: one of prefill and some of decode.
_NUM_TOKENS = 4
#: Blocks of a prompt, at least.
_NUM_BLOCKS = 4
_PAGE_SECONDS = 5.0
#: Of a prompt, however large the blocks are that a frontend reports.
_MOST_LETTERS = 1 << 14
#: Errors of JSON that is none, or not as expected.
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, KeyError, TypeError)


class Instance(msgspec.Struct, frozen=True):
    """One endpoint of one worker, as discovery lists it."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int


class AnswerTrace(msgspec.Struct, frozen=True):
    """The request trace in an answer (handlers/trace.py)."""

    strategy: str = ""
    reason: str = ""
    fallbacks: list[str] = []
    prefill_instance: str | None = None
    decode_instance: str | None = None
    #: None where the engine has not measured it.
    kv_transfer_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    prompt_tokens: int
    cached_tokens: int
    #: The share of the prompt's blocks that the router found on the worker; None without KV routing.
    hit_rate: float | None
    #: The workers that the frontend chose; equal unless it chains both stages itself.
    prefill_worker: int | None
    decode_worker: int | None
    #: None for workers of other projects.
    trace: AnswerTrace | None


class ProbeFailedError(DisaggError):
    """The deployment did not answer a request."""

    category = "Unavailable"
    status = 503


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model; None where the frontend does not report them."""

    block_size: int | None = None
    context_length: int | None = None


def fresh_prompt(sizes: Sizes) -> str:
    """A prompt unlike all earlier ones, of some blocks at least unless the model has no room: letters, which are a
    token each in most tokenizers and at most two.
    """
    count = min((_NUM_BLOCKS + 1) * (sizes.block_size or 32), _MOST_LETTERS)
    if sizes.context_length is not None:
        count = max(1, min(count, (sizes.context_length - _NUM_TOKENS) // 2))
    return " ".join(random.choices(string.ascii_lowercase, k=count))


class FrontendClient:
    def __init__(self, url: str, seconds: float) -> None:
        """`seconds`: the timeout of an answer. Raises ConfigError for an invalid URL."""
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
        """Raises ConfigError when there is no frontend."""
        try:
            return _names(json.loads(self._page("/v1/models")))
        except OSError as error:
            allowed = f"the URL of a frontend that answers ({error})"
            raise ConfigError.bad_value("--url", self.url, allowed) from error
        except _UNREADABLE as error:
            raise ConfigError.bad_value(
                "--url", self.url, "the URL of a frontend; what is there has no list of models"
            ) from error

    def instances(self) -> list[Instance] | None:
        """The instances; None where the frontend does not list them."""
        try:
            return msgspec.json.decode(self._page("/health"), type=_Health).instances
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
        try:
            return self._asked("/v1/completions", body | {"prompt": prompt})
        except _NotServedError:
            return self._asked(
                "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}
            )

    def _asked(self, path: str, body: dict[str, Any]) -> Answer:
        try:
            status, answer = asyncio.run(ask(self.url + path, self._seconds, body))
            if status == HTTPStatus.OK:
                return answer_of(answer)
        except (OSError, *_UNREADABLE) as error:
            raise ProbeFailedError(str(error)) from error
        refused = _NotServedError if status == HTTPStatus.NOT_FOUND else ProbeFailedError
        raise refused(f"{status}: {_message(answer)}")

    def _page(self, path: str) -> bytes:
        """Raises OSError."""
        status, page = asyncio.run(ask(self.url + path, _PAGE_SECONDS))
        if status != HTTPStatus.OK:
            raise OSError(f"HTTP {status}")
        return page


class _NotServedError(ProbeFailedError):
    """The frontend serves the model at another path, or not at all."""


class _Health(msgspec.Struct, frozen=True):
    instances: list[Instance] | None = None


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _WorkerIds(msgspec.Struct, frozen=True):
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None


class _Timing(msgspec.Struct, frozen=True):
    kv_hit_rate: float | None = None


class _Nvext(msgspec.Struct, frozen=True):
    worker_id: _WorkerIds | None = None
    timing: _Timing | None = None
    engine_data: dict[str, Any] | None = None


class _Completion(msgspec.Struct, frozen=True):
    usage: _Usage | None = None
    nvext: _Nvext | None = None


def answer_of(body: bytes) -> Answer:
    """Raises one of _UNREADABLE for an answer that is no completion."""
    said = msgspec.json.decode(body, type=_Completion)
    usage, nvext = said.usage or _Usage(), said.nvext or _Nvext()
    workers, timing = nvext.worker_id or _WorkerIds(), nvext.timing or _Timing()
    trace = (nvext.engine_data or {}).get(ENGINE_DATA)
    return Answer(
        usage.prompt_tokens,
        (usage.prompt_tokens_details or _PromptDetails()).cached_tokens or 0,
        timing.kv_hit_rate,
        workers.prefill_worker_id,
        workers.decode_worker_id,
        None if trace is None else msgspec.convert(trace, AnswerTrace),
    )


def _names(listed: Any) -> list[str]:
    """Raises one of _UNREADABLE for what is no list of models, with names that a terminal can show."""
    names = [str(each["id"]) for each in listed["data"]]
    if not all(map(str.isprintable, names)):
        raise ValueError("a name with control characters")
    return names


def _number(page: str, metric: str, model: str) -> int | None:
    found = re.search(rf'^{metric}{{model="{re.escape(model)}"}} (\d{{1,15}})\b', page, re.MULTILINE)
    return int(found[1]) or None if found else None


def _message(body: bytes) -> str:
    """As Dynamo's frontend writes it, or the beginning of what another server writes."""
    try:
        return str(json.loads(body)["message"])
    except _UNREADABLE:
        return body.decode(errors="replace")[:200]


def environ_of_listener(host: str, port: int) -> Mapping[str, str]:
    """The environment of this user's process that listens at the port; empty for another user's or machine's."""
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
