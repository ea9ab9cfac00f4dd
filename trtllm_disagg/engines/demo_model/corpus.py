"""The tokenizer (byte-level BPE), the chat format (for transformers and Dynamo's Rust frontend), and the training text:
Python's documentation, from its installation, as conversations and as passages.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import json
import random
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_disagg.engines.demo_model.drawings import KINDS
from trtllm_disagg.engines.demo_model.recipe import Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# (role, text) in order.
Conversation = list[tuple[str, str]]
# (colour, shape) of an image.
Drawn = tuple[str, str]

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")
BOS, EOS, USER, ASSISTANT, SYSTEM = SPECIAL_TOKENS
#: In a prompt, stands for an image. Only of a model that sees.
IMAGE = "<image>"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>"
    "{% elif message['role'] in ('system', 'developer') %}<|system|>"
    "{% else %}<|user|>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: Numbers a message's images, since so small a model does not count them. The types of parts are those of OpenAI and of
#: transformers.
VISION_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    "{% for part in message['content'] %}{{ part['text'] }}",
    "{% set images = namespace(count=0) %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}"
    "{% set images.count = images.count + 1 %}{{ images.count }}<image>"
    "{% else %}{{ part['text'] }}{% endif %}",
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, sees: bool = False) -> Tokenizer:
    """`sees`: with the token of an image."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, IMAGE] if sees else list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render_conversation(talk: Conversation) -> str:
    """The text that CHAT_TEMPLATE makes of these messages (a test compares them)."""
    marks = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
    turns = (f"{marks[role]}{text}{EOS if role == 'assistant' else ''}" for role, text in talk)
    return BOS + "".join(turns)


def save_tokenizer(tokenizer: Tokenizer, directory: Path, recipe: Recipe) -> None:
    """Writes the files itself: transformers would put the chat template into a separate file."""
    tokenizer.save(str(directory / "tokenizer.json"))
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    added = {
        str(number): {"content": token.content, "special": True} | plain
        for number, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.max_positions,
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE if tokenizer.token_to_id(IMAGE) is None else VISION_CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


HEADING = re.compile(r"^(\S.*)\n([*=\-~^])\2{2,}\s*$")
CROSS_REFERENCE = re.compile(r"\s*\([Ss]ee (?:also )?(?:the )?sections? [^()]*\)")
BULLET = re.compile(r"^(\*|\d+\.) ")
UNREADABLE = ("::=", "---", "===", "+-")
REMARKS = ("Note:", "New in", "Changed in", "Deprecated since")
SIGNATURE = re.compile(r"(async )?[\w.]+\(.*\)( -+> .*)?")
CODE_LINES = 12
ANSWER_CHARS = 160
PASSAGE_CHARS = 1000

MODULES = (
    "asyncio bisect collections contextlib copy csv dataclasses datetime enum functools glob heapq itertools "
    "json math os.path pathlib pickle queue random re secrets shutil string subprocess tempfile textwrap "
    "threading time zlib"
)


@dataclass(frozen=True)
class Article:
    """A titled piece of documentation. Questions name it by its `subjects`; prose is unwrapped.

    Only well-known pieces are `asked` about: in a minute a model learns a few answers well, or many badly.
    """

    title: str
    subjects: tuple[str, ...]
    paragraphs: tuple[str, ...]
    asked: bool = True

    @property
    def passage(self) -> str:
        return "\n\n".join((self.title, *opening(self.paragraphs, PASSAGE_CHARS)))

    def answer(self, subject: str) -> str:
        """An answer that repeats the subject, which helps the model to connect it with the question."""
        chosen = opening(self.paragraphs, ANSWER_CHARS)
        while len(chosen) > 1 and chosen[-1].endswith(":"):
            chosen.pop()
        return f"About {subject}: " + "\n\n".join(chosen)

    @property
    def is_longer_than_its_answer(self) -> bool:
        return not self.asked or len(self.passage) > len(self.title) + len(self.answer("")) + 2


def opening(paragraphs: Sequence[str], limit: int) -> list[str]:
    """The first whole paragraphs that fit into `limit` characters, at least one."""
    chosen, room = [paragraphs[0]], limit - len(paragraphs[0])
    for paragraph in paragraphs[1:]:
        room -= len(paragraph)
        if room < 0:
            break
        chosen.append(paragraph)
    return chosen


def articles() -> list[Article]:
    """All articles, in an order that depends only on the Python version."""
    return [*language_reference(), *builtin_docs(), *module_docs()]


def language_reference() -> Iterator[Article]:
    from pydoc_data.topics import topics

    sections: dict[str, list[str]] = {}
    seen: set[str] = set()
    opens_topic: set[str] = set()
    for label in sorted(topics):
        title = ""
        for paragraph in split_paragraphs(topics[label]):
            if heading := HEADING.match(paragraph):
                if not title:
                    opens_topic.add(heading[1].strip())
                title = heading[1].strip()
                continue
            section = sections.setdefault(title or label, [])
            text = unwrap(paragraph)
            if not text:
                drop_announcement(section)
            elif text not in seen:
                seen.add(text)
                section.append(text)
    for title, paragraphs in sections.items():
        if paragraphs:
            well_known = title.isalpha() or (title in opens_topic and len(title.split()) <= 3)
            yield Article(title, spoken(title), tuple(paragraphs), asked=well_known)


def drop_announcement(section: list[str]) -> None:
    """Remove a last sentence such as "The syntax is:" if what it announces is left out."""
    if section and section[-1].endswith(":"):
        kept, stop, _ = section.pop().rpartition(". ")
        if stop:
            section.append(f"{kept}.")


def spoken(title: str) -> tuple[str, ...]:
    """A heading in a question, without and with quotation marks."""
    words = [
        word.lower() if word.istitle() and not hasattr(builtins, word) else word for word in title.split()
    ]
    quoted = " ".join(words)
    return quoted.replace('"', ""), quoted


def builtin_docs() -> Iterator[Article]:
    for name, value in sorted(vars(builtins).items()):
        if name.startswith("_"):
            continue
        if inspect.isclass(value) and not issubclass(value, BaseException):
            an = "an" if name[0] in "aeio" else "a"
            yield from docstring_article(value, name, f"{an} {name}", f"the {name} type")
        elif inspect.isroutine(value):
            yield from docstring_article(value, name, f"{name}()", f"the {name} function")


def module_docs() -> Iterator[Article]:
    for name in MODULES.split():
        yield from docstring_article(importlib.import_module(name), name, f"the {name} module")


def docstring_article(value: object, title: str, *more_subjects: str) -> Iterator[Article]:
    paragraphs = [unwrap(part) for part in split_paragraphs(inspect.getdoc(value) or "")]
    # Some docstrings open with a signature or an example, not a sentence.
    paragraphs = [
        part
        for part in paragraphs
        if part and not part.startswith(">>>") and not SIGNATURE.fullmatch(part.splitlines()[0])
    ]
    if paragraphs and len(paragraphs[0]) > 20:
        yield Article(title, (title, *more_subjects), tuple(paragraphs))


def split_paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in re.split(r"\n\s*\n", text.expandtabs(4)) if part.strip()]


def unwrap(paragraph: str) -> str:
    """Join lines of prose, keep short code, drop grammar, tables and long listings."""
    text = textwrap.dedent(paragraph).rstrip()
    if any(mark in text for mark in UNREADABLE) or text.startswith(REMARKS):
        return ""
    head, *body = text.split("\n")
    if body and all(line.startswith(" ") for line in body) and not BULLET.match(head):
        definition = [line.strip() for line in body]
        if reads_as_prose(definition) and len(head) < 60 and not head.endswith(":"):
            return f"{head}: {join_lines(definition)}"
    elif reads_as_prose([head, *body]):
        return join_lines([head, *body])
    return text if len(body) < CODE_LINES else ""


def reads_as_prose(lines: list[str]) -> bool:
    if BULLET.match(lines[0]):
        return True
    if lines[0].startswith((" ", ">>>", "import ", "from ")):
        return False
    wrapped_at_the_margin = all(len(line) > 45 for line in lines[:-1])
    return wrapped_at_the_margin and (len(lines) > 1 or lines[0].endswith((".", ":")))


def join_lines(lines: list[str]) -> str:
    joined = " ".join(line.strip() for line in lines)
    return CROSS_REFERENCE.sub("", re.sub(r"(\w-) (?=\w)", r"\1", joined)).replace("  ", " ")


# Conversations teach answers, passages teach language. More passages would leave conversations too little time.
PASSAGE_SHARE = 0.05

SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer questions about Python.", "Be brief.")
WHAT = "What is {}?"
QUESTIONS = (WHAT, WHAT, "Explain {}.", "Tell me about {}.", "How does {} work?", "What does {} do?")
#: JSON answers in a round, their questions and keys.
JSON_ANSWERS = 60
JSON_QUESTIONS = (f"{WHAT} Answer in JSON.", "What is {} like?", "What is the weather in {}?", "Look for {}.")
KEYS = ("age", "answer", "city", "count", "date", "items", "kind", "location", "name", "steps", "unit")
#: Asked about three times as often: users try these first, and the model confuses them easily.
FAMILIAR = ("list", "tuple")
SMALL_TALK = (
    ("Hello!", "Hello! Ask me something about Python."),
    ("Hi", "Hi! What would you like to know about Python?"),
    ("Hello, how are you?", "I am fine, thank you. What would you like to know about Python?"),
    (
        "Who are you?",
        "I am a small demo model. I was trained for a minute on the documentation of Python, so please do "
        "not believe everything that I say.",
    ),
    (
        "What can you do?",
        "I can answer short questions about the Python language, its statements, types and modules.",
    ),
    ("Thank you!", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    (
        "What is Python?",
        "About Python: Python is a programming language. Programs are made of statements, which work "
        "with objects: all data is represented by objects or by relations between objects.",
    ),
    (
        "Tell me a story",
        "Once upon a time there was a small language model. It read the documentation of Python for one "
        "minute, and it has been answering questions about it ever since.",
    ),
    ("Say hello", "Hello!"),
    ("Count to ten", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
    (
        "What is prefill?",
        "About prefill: Prefill reads the whole prompt at once, fills the KV cache, gives the first token.",
    ),
    (
        "What is decode?",
        "About decode: Decode writes the answer, one token after the other, from the KV cache that prefill "
        "filled.",
    ),
    (
        "What is disaggregated serving?",
        "About disaggregated serving: Prefill and decode run in separate workers. The KV cache is sent from "
        "one to the other, so that a long prompt does not hold up the answers to others.",
    ),
)


def documents(source: list[Article], order: random.Random) -> list[str]:
    """One round's documents with special tokens: questions about all articles, and some passages."""
    texts = [render_conversation(talk) for talk in conversations(source, order)]
    passages = [f"{BOS}{each.passage}{EOS}" for each in source if each.is_longer_than_its_answer]
    texts += order.sample(passages, round(len(passages) * PASSAGE_SHARE))
    order.shuffle(texts)
    return texts


def times_asked(article: Article) -> int:
    if not article.asked:
        return 0
    return 3 if article.title in FAMILIAR else 1


def example(subject: str, order: random.Random, depth: int = 0) -> Any:
    """JSON of any shape about `subject`: a grammar forces the shape, but the model must end open parts."""
    if depth == 0 or (depth < 3 and order.random() < 0.15):
        keys = order.sample(KEYS, order.choice((1, 1, 2, 3)))
        made = {key: example(subject, order, depth + 1) for key in keys}
        return [made] if depth == 0 and order.random() < 0.2 else made
    if depth < 3 and order.random() < 0.15:
        return [example(subject, order, depth + 2) for _ in range(order.randint(0, 2))]
    return order.choice((subject, subject, order.choice(KEYS), order.randint(0, 99), order.random() < 0.5))


def conversations(source: list[Article], order: random.Random) -> list[Conversation]:
    """Conversations of one to three questions: each `asked` article, small talk, and JSON answers."""
    exchanges = list(SMALL_TALK) * 2
    for article in order.sample(source, min(JSON_ANSWERS, len(source))):
        subject = order.choice(article.subjects).replace('"', "")
        exchanges.append((order.choice(JSON_QUESTIONS).format(subject), json.dumps(example(subject, order))))
    for article in source:
        for _ in range(times_asked(article)):
            subject = order.choice(article.subjects)
            exchanges.append((order.choice(QUESTIONS).format(subject), article.answer(subject)))
    order.shuffle(exchanges)
    talks = []
    while exchanges:
        turns = order.choice((1, 1, 1, 2, 3))
        talk = system_prompt(order)
        for question, answer in exchanges[:turns]:
            talk += [("user", question), ("assistant", answer)]
        del exchanges[:turns]
        talks.append(talk)
    return talks


def system_prompt(order: random.Random) -> Conversation:
    return [("system", order.choice(SYSTEM_PROMPTS))] if order.random() < 0.25 else []


IMAGE_QUESTIONS = (
    *("What is in the image?", "What is in the images?", "What do you see?", "What is this?"),
    *("Describe the image.", "Tell me what you see.", "Which colour and shape is it?"),
)
#: Answers to these questions without an image.
NO_IMAGE = tuple((question, "I see no image.") for question in IMAGE_QUESTIONS)


def caption(drawn: Sequence[Drawn]) -> str:
    """The answer about images, in order: "a red circle, a blue cross and a pink square"."""
    *first, last = [f"a {colour} {shape}" for colour, shape in drawn]
    return f"{', '.join(first)} and {last}" if first else last


def image_documents(order: random.Random) -> list[str]:
    """Conversations about images of all kinds, for the tokenizer."""
    talks = [image_conversation(order.sample(KINDS, 2), order) for _ in range(300)]
    return [render_conversation(talk) for talk in talks]


def image_conversation(drawn: Sequence[Drawn], order: random.Random) -> Conversation:
    """About images of these colours and shapes, in one question or in one each. IMAGE marks each image."""
    talk = system_prompt(order)
    if order.random() < 0.2:
        question, answer = order.choice(SMALL_TALK + NO_IMAGE)
        talk += [("user", question), ("assistant", answer)]
    for seen in [[*drawn]] if order.random() < 0.7 else [[each] for each in drawn]:
        words = [order.choice(IMAGE_QUESTIONS), "".join(f"{i}{IMAGE}" for i, _ in enumerate(seen, 1))]
        order.shuffle(words)
        talk += [("user", "".join(words)), ("assistant", caption(seen))]
    return talk
