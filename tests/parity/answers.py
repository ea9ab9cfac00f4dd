"""A question to the frontend through the openai client, and everything that its answer says."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from openai import APIStatusError, OpenAI

from tests.support.deployments import MODEL_NAME

Api = Literal["chat", "completions"]

_TOKEN_ID = "token_id:"


@dataclass(frozen=True)
class TokenLogprob:
    """Of the chosen token, then of the best ones. As float32, which is what the engine computes with."""

    token_id: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    #: None where the frontend may count by itself: it ended the answer, at a stop string.
    cached_tokens: int | None


@dataclass(frozen=True)
class Answer:
    """Equal answers are equal down to the last bit of every logprob."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    usage: Usage | None = None
    #: What the workers say of how it came about.
    told: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def without_cached_tokens(self) -> Answer:
        assert self.usage is not None
        return replace(self, usage=replace(self.usage, cached_tokens=None))


@dataclass(frozen=True)
class Refusal:
    status: int
    message: str


def without_cached_tokens(answers: Sequence[Answer | Refusal]) -> list[Answer | Refusal]:
    return [answer.without_cached_tokens() if isinstance(answer, Answer) else answer for answer in answers]


@dataclass(frozen=True)
class Question:
    """`prompt` is text or token ids for completions, messages for chat; `options` go into the body."""

    api: Api
    prompt: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    salt: str = ""
    #: Dynamo tells the token ids of an answer when asked to, so that texts need not stand in for them.
    wants_token_ids: bool = True
    annotations: tuple[str, ...] = ()

    @property
    def body(self) -> dict[str, Any]:
        nvext: dict[str, Any] = {"cache_salt": self.salt} if self.salt else {}
        if self.wants_token_ids:
            nvext["extra_fields"] = ["completion_token_ids", "engine_data"]
        if self.annotations:
            nvext["annotations"] = list(self.annotations)
        return {"nvext": nvext, **self.options}


def ask(client: OpenAI, question: Question) -> Answer | Refusal:
    try:
        answer = _streamed(client, question) if question.stream else _whole(client, question)
    except APIStatusError as error:
        return Refusal(error.status_code, error.response.json()["message"])
    if answer.finish_reason == "stop" and "stop" in question.options:
        # Only the worker's last chunk says what was cached. Whether that came with the string is chance.
        return answer.without_cached_tokens()
    return answer


def ask_each(client: OpenAI, question: Question) -> list[Answer]:
    """Its choices by index, each with the usage of all."""
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    answer = _create(client, question, **(options if question.stream else {}))
    chunks = [chunk.model_dump() for chunk in (answer if question.stream else [answer])]
    return [
        _answer(
            question.api,
            [
                chunk | {"choices": [each for each in _choices([chunk]) if each["index"] == i]}
                for chunk in chunks
            ],
        )
        for i in sorted({choice["index"] for choice in _choices(chunks)})
    ]


def float32(value: float) -> float:
    """The float32 of which `value` is some decimal or double form."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def _whole(client: OpenAI, question: Question) -> Answer:
    return _answer(question.api, [_create(client, question).model_dump()])


def _streamed(client: OpenAI, question: Question) -> Answer:
    with _create(client, question, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = [chunk.model_dump() for chunk in stream]
    ends = [i for i, choice in enumerate(_choices(chunks)) if choice["finish_reason"] is not None]
    assert ends == [len(_choices(chunks)) - 1], "one end, and nothing behind it"
    assert [chunk["usage"] is not None for chunk in chunks].count(True) == 1, "usage comes once"
    return _answer(question.api, chunks)


def _create(client: OpenAI, question: Question, **more: Any) -> Any:
    # Not as keywords: the client does not know all options, and sends them as they are either way.
    more |= {"model": MODEL_NAME, "extra_body": question.body}
    if question.api == "chat":
        return client.chat.completions.create(messages=question.prompt, **more)
    return client.completions.create(prompt=question.prompt, **more)


def _answer(api: Api, chunks: list[dict[str, Any]]) -> Answer:
    choices = _choices(chunks)
    read = _chat_logprobs if api == "chat" else _completions_logprobs
    [usage] = [chunk["usage"] for chunk in chunks if chunk["usage"] is not None]
    return Answer(
        text="".join(_text(choice) for choice in choices),
        token_ids=tuple(
            token
            for chunk in chunks
            for token in (chunk.get("nvext") or {}).get("completion_token_ids") or ()
        ),
        finish_reason=choices[-1]["finish_reason"],
        logprobs=tuple(
            entry for choice in choices if choice["logprobs"] for entry in read(choice["logprobs"])
        ),
        usage=_usage(usage),
        told=_told(chunks),
    )


def _told(chunks: list[dict[str, Any]]) -> Mapping[str, Any]:
    said = [(chunk.get("nvext") or {}).get("engine_data") for chunk in chunks]
    told: dict[str, Any] = next((each["disagg"] for each in reversed(said) if each), {})
    return told


def _choices(chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"])["content"] or "")


def _usage(usage: dict[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["total_tokens"],
        details.get("cached_tokens"),
    )


def _completions_logprobs(logprobs: dict[str, Any]) -> Iterable[TokenLogprob]:
    """Asked for with return_tokens_as_token_ids: different tokens may have the same text."""
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        yield TokenLogprob(
            _id(token), float32(logprob), {_id(name): float32(value) for name, value in top.items()}
        )


def _chat_logprobs(logprobs: dict[str, Any]) -> Iterable[TokenLogprob]:
    for entry in logprobs["content"]:
        top = {_id(best["token"]): float32(best["logprob"]) for best in entry["top_logprobs"]}
        yield TokenLogprob(_id(entry["token"]), float32(entry["logprob"]), top)


def _id(name: str) -> int:
    assert name.startswith(_TOKEN_ID), f"{name!r} is not a token id"
    return int(name.removeprefix(_TOKEN_ID))
