"""What is asked. A case is one or more questions, one after the other; later ones may find a warm cache."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.parity.answers import Api, Question
from tests.parity.oracle import Oracle
from trtllm_disagg.engines.demo_model.drawings import data_url, draw

BOTH: tuple[Api, ...] = ("chat", "completions")

#: Prompts of token ids: no special token, and inside any vocabulary of ours.
_SOME_IDS = range(300, 1300)

#: The most tokens of an answer that is to stop earlier.
ROOM = 24

Options = Mapping[str, Any]
Build = Callable[[Oracle, Api], list[Question]]


@dataclass(frozen=True)
class Case:
    name: str
    build: Build
    apis: tuple[Api, ...] = BOTH
    #: What it finds in the cache depends on earlier answers, which a prefill worker has never seen.
    reuses_answers: bool = False

    def questions(self, oracle: Oracle, api: Api, stream: bool, salt: str = "") -> list[Question]:
        """All of them share a cache, and no other case uses it."""
        salt = f"{salt}{self.name}-{api}-{stream}"
        return [replace(q, stream=stream, salt=salt) for q in _built(self, oracle, api)]

    def __str__(self) -> str:
        return self.name


@functools.cache
def _built(case: Case, oracle: Oracle, api: Api) -> list[Question]:
    return case.build(oracle, api)


def say(api: Api, text: str, **options: Any) -> Question:
    if api == "chat":
        return Question(api, [{"role": "user", "content": text}], options)
    # The demo model ends a bare question at once, so that its completion would be empty: an answer has begun here.
    return Question(api, f"{text} With", options)


def asked(text: str, **options: Any) -> Build:
    return lambda oracle, api: [say(api, text, **options)]


def with_logprobs(text: str, best: int, **options: Any) -> Build:
    def build(oracle: Oracle, api: Api) -> list[Question]:
        wanted = {"logprobs": True, "top_logprobs": best} if api == "chat" else {"logprobs": best}
        return [say(api, text, return_tokens_as_token_ids=True, **wanted, **options)]

    return build


def ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(_SOME_IDS, k=count)


def words(count: int) -> str:
    """A prompt that is long in every tokenizer: `count` numbers."""
    return " ".join(map(str, range(count)))


# -- where an answer stops: taken from the answer that does not


def _greedy(oracle: Oracle, api: Api, text: str) -> tuple[int, ...]:
    return oracle.answer(say(api, text, max_tokens=ROOM, ignore_eos=True)).token_ids


def _stopped(text: str, find: Callable[[Oracle, tuple[int, ...]], Options]) -> Build:
    def build(oracle: Oracle, api: Api) -> list[Question]:
        options = find(oracle, _greedy(oracle, api, text))
        return [say(api, text, max_tokens=ROOM, **options)]

    return build


def _stop_token(oracle: Oracle, tokens: tuple[int, ...]) -> Options:
    """One that is not there before."""
    position = next(i for i in range(2, len(tokens)) if tokens[i] not in tokens[:i])
    return {"stop_token_ids": [tokens[position]]}


def _stop_string(oracle: Oracle, tokens: tuple[int, ...]) -> Options:
    """The end of one token's text and the start of the next one's."""
    text = oracle.text(list(tokens))
    cut = len(oracle.text(list(tokens[:3])))
    return {"stop": text[cut - 2 : cut + 2]}


def _stop_string_at_once(oracle: Oracle, tokens: tuple[int, ...]) -> Options:
    return {"stop": oracle.text(list(tokens))[:2]}


def _first_token_is_eos(oracle: Oracle, api: Api) -> list[Question]:
    """After the whole of an answer that ends by itself, what comes next is its end."""
    for start in (
        "What is a list?",
        "What are you?",
        "What does len return?",
        "How does sorted work?",
        "Why?",
    ):
        question = say("chat", start, max_tokens=200)
        answer = oracle.answer(question)
        if answer.finish_reason == "stop":
            return [Question(api, [*oracle.prompt_ids(question), *answer.token_ids], {"max_tokens": 8})]
    raise AssertionError("the model ends none of its answers")


# -- what a cache may hold already


def _same_again(oracle: Oracle, api: Api) -> list[Question]:
    return [say(api, f"Add these up: {words(40)}", max_tokens=8)] * 2


def _shared_prefix(oracle: Oracle, api: Api) -> list[Question]:
    return [say(api, f"{words(80)}. {end}", max_tokens=8) for end in ("Add them up.", "Sort them.", "Why?")]


def _conversation(oracle: Oracle, api: Api) -> list[Question]:
    """The second question brings the first one's answer along."""
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Sort {words(20)}."}]
    answer = oracle.answer(Question(api, first, {"max_tokens": 40, "ignore_eos": True})).text
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
    options = {"max_tokens": 40, "ignore_eos": True}
    return [Question(api, messages, options) for messages in (first, second)]


def _around_blocks(oracle: Oracle, api: Api) -> list[Question]:
    """Prompts that end before, at and behind the end of a block of 16; again, with the block in the cache."""
    prompt = ids(33, seed=1)
    return [Question(api, prompt[:count], {"max_tokens": 3}) for count in (1, 15, 16, 17, 32, 33, 32, 16)]


def _long_prompt(oracle: Oracle, api: Api) -> list[Question]:
    """More than two steps of agg; several of a prefill worker's too, when other requests run."""
    for count in range(200, 1200, 50):
        question = say(api, words(count), max_tokens=8)
        if len(oracle.prompt_ids(question)) > 1100:
            return [question]
    raise AssertionError("numbers are not tokens")


def _full_context(oracle: Oracle, api: Api) -> list[Question]:
    """Without max_tokens: up to the last position."""
    return [Question(api, ids(oracle.max_seq_len - 6, seed=2), {"ignore_eos": True})]


# -- images: colours and shapes of the demo model's drawings, all of one size


def seen(text: str, *drawings: str, **options: Any) -> Question:
    """A chat about images, such as "red circle"."""
    pairs = [each.split() for each in drawings]
    images = [data_url(draw(colour, shape, random.Random(3))) for colour, shape in pairs]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    content = [{"type": "text", "text": text}, *parts]
    return Question("chat", [{"role": "user", "content": content}], {"max_tokens": 16} | options)


WHAT = "What is in the image?"


def about(*drawings: str, **options: Any) -> Build:
    return lambda oracle, api: [seen(WHAT, *drawings, **options)]


def _swapped(oracle: Oracle, api: Api) -> list[Question]:
    """The same text and length each time; the cache has the first image when the others come."""
    drawings = ("red circle", "blue circle", "red circle", "red square")
    return [seen(WHAT, each) for each in drawings]


def _swapped_places(oracle: Oracle, api: Api) -> list[Question]:
    pair = ("green triangle", "pink cross")
    return [seen(WHAT, *pair), seen(WHAT, *pair[::-1])]


def _image_turns(oracle: Oracle, api: Api) -> list[Question]:
    first = seen(WHAT, "yellow square", max_tokens=24, ignore_eos=True)
    second = seen("And this?", "blue cross").prompt
    answer = {"role": "assistant", "content": oracle.answer(first).text}
    return [first, replace(first, prompt=[*first.prompt, answer, *second])]


def _image_across_chunks(oracle: Oracle, api: Api) -> list[Question]:
    """An image that begins in prefill's first step and ends in its second, and ten images behind it."""
    for count in range(150, 600):
        question = seen(f"{words(count)} {WHAT}", *["red circle", "blue square"] * 5)
        if 512 - oracle.prompt_ids(question).index(oracle.image_token) in range(1, 16):
            return [question]
    raise AssertionError("numbers are not tokens")


CHAT: tuple[Api, ...] = ("chat",)
COMPLETIONS: tuple[Api, ...] = ("completions",)
_SEEDED = {"max_tokens": 24, "temperature": 0.9, "seed": 11}

CASES = (
    Case("greedy", asked("What is a list in Python?", max_tokens=24)),
    Case("temperature_0", asked("What is a tuple in Python?", max_tokens=24, temperature=0.0)),
    Case("ignore_eos", asked("What is a dictionary?", max_tokens=48, ignore_eos=True)),
    Case("min_tokens", asked("What is a set?", max_tokens=32, min_tokens=24)),
    Case("max_tokens_1", asked("What is a string?", max_tokens=1)),
    Case("seeded", asked("How do I open a file?", **_SEEDED)),
    Case("seeded_top_p", asked("How do I close a file?", **_SEEDED, top_p=0.7)),
    Case(
        "seeded_penalties",
        asked("How do I read a file?", **_SEEDED, top_p=0.9, presence_penalty=0.7, frequency_penalty=0.5),
    ),
    Case("seeded_top_k", asked("Write a file.", **_SEEDED, top_k=20, min_p=0.02, repetition_penalty=1.3)),
    Case("greedy_penalties", asked("Copy a file.", max_tokens=24, temperature=0.0, frequency_penalty=0.9)),
    Case("stop_token", _stopped("What does len return?", _stop_token)),
    Case("first_token_stops", _stopped("What does abs return?", lambda _, t: {"stop_token_ids": [t[0]]})),
    Case("first_token_is_eos", _first_token_is_eos, COMPLETIONS),
    Case("stop_string", _stopped("What does max return?", _stop_string)),
    Case("stop_string_at_once", _stopped("What does min return?", _stop_string_at_once)),
    Case("logprobs", with_logprobs("What is a module?", 3, max_tokens=16)),
    Case("logprobs_seeded", with_logprobs("What is a class?", 5, **_SEEDED)),
    Case("logprobs_max_tokens_1", with_logprobs("What is a method?", 2, max_tokens=1)),
    # In agg the answer fills up the block that the prompt ends in, so that its start can be found again.
    Case("same_again", _same_again, reuses_answers=True),
    Case("shared_prefix", _shared_prefix, reuses_answers=True),
    Case("conversation", _conversation, ("chat",), reuses_answers=True),
    Case("around_blocks", _around_blocks, COMPLETIONS, reuses_answers=True),
    Case("long_prompt", _long_prompt),
    Case("full_context", _full_context, COMPLETIONS),
    Case("image", about("red circle"), CHAT),
    Case(
        "image_seeded",
        about("blue square", **_SEEDED, logprobs=True, top_logprobs=3, return_tokens_as_token_ids=True),
        CHAT,
    ),
    Case("image_penalties", about("pink cross", frequency_penalty=0.9, repetition_penalty=1.3), CHAT),
    Case("image_max_tokens_1", about("green circle", max_tokens=1), CHAT),
    Case("images_swapped", _swapped, CHAT, reuses_answers=True),
    Case("images_in_swapped_places", _swapped_places, CHAT, reuses_answers=True),
    Case("image_turns", _image_turns, CHAT, reuses_answers=True),
    Case("image_across_chunks", _image_across_chunks, CHAT),
)

#: All at once. All are single questions.
MIXTURE = (
    *(("greedy", api, stream) for api in BOTH for stream in (False, True)),
    ("seeded_penalties", "chat", True),
    ("seeded_penalties", "completions", False),
    ("seeded_top_p", "completions", True),
    ("ignore_eos", "chat", True),
    ("ignore_eos", "completions", True),
    ("max_tokens_1", "chat", False),
    ("stop_token", "completions", True),
    ("stop_string", "chat", True),
    ("first_token_stops", "completions", False),
    ("logprobs_seeded", "chat", True),
    ("long_prompt", "completions", True),
    ("full_context", "completions", True),
    ("image", "chat", True),
    ("image_seeded", "chat", False),
    ("image_across_chunks", "chat", True),
)
