"""The training text: Python's own documentation, which every installation has, as conversations with questions and
answers and as passages of running text. Before it, a byte-level BPE tokenizer and the chat format, for transformers as
well as for Dynamo's Rust frontend.
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
from typing import TYPE_CHECKING

from trtllm_disagg.engines.demo_model.recipe import Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# (role, text) in the order in which they were said.
Conversation = list[tuple[str, str]]

BOS, EOS, USER, ASSISTANT, SYSTEM = SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)

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


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render_passage(text: str) -> str:
    return f"{BOS}{text}{EOS}"


def render_conversation(talk: Conversation) -> str:
    """The text that CHAT_TEMPLATE makes of the same messages; a test compares the two."""
    marks = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
    turns = (f"{marks[role]}{text}{EOS if role == 'assistant' else ''}" for role, text in talk)
    return BOS + "".join(turns)


def save_tokenizer(tokenizer: Tokenizer, directory: Path, recipe: Recipe) -> None:
    """Writes the files itself, because transformers would put the chat template into a separate file."""
    tokenizer.save(str(directory / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
        for token in SPECIAL_TOKENS
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.max_positions,
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
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
    """A titled piece of documentation. `subjects` are the names that a question may use; prose is unwrapped.

    Only well-known pieces are `asked` about: in a minute, a model learns a few answers well or many badly.
    """

    title: str
    subjects: tuple[str, ...]
    paragraphs: tuple[str, ...]
    asked: bool = True

    @property
    def passage(self) -> str:
        return "\n\n".join((self.title, *opening(self.paragraphs, PASSAGE_CHARS)))

    def answer(self, subject: str) -> str:
        """An answer that repeats the subject: copying it from the question helps the model to connect the two."""
        chosen = opening(self.paragraphs, ANSWER_CHARS)
        while len(chosen) > 1 and chosen[-1].endswith(":"):
            chosen.pop()
        return f"About {subject}: " + "\n\n".join(chosen)

    @property
    def is_longer_than_its_answer(self) -> bool:
        return not self.asked or len(self.passage) > len(self.title) + len(self.answer("")) + 2


def opening(paragraphs: Sequence[str], limit: int) -> list[str]:
    """The first paragraphs, whole, as many as fit into `limit` characters, but at least one."""
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
    """Removes a last sentence such as "The syntax is:" when what it announces is left out."""
    if section and section[-1].endswith(":"):
        kept, stop, _ = section.pop().rpartition(". ")
        if stop:
            section.append(f"{kept}.")


def spoken(title: str) -> tuple[str, ...]:
    """A heading as part of a question, without and with its quotation marks."""
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
    # Old docstrings open with a signature, and some with an example: neither is a sentence.
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
    """Joins the lines of prose, leaves short code as it is, and drops grammar, tables and long listings."""
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


# Conversations teach answers and passages teach language. More passages leave too little time for conversations.
PASSAGE_SHARE = 0.05

SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer questions about Python.", "Be brief.")
QUESTIONS = (
    "What is {}?",
    "What is {}?",
    "Explain {}.",
    "Tell me about {}.",
    "How does {} work?",
    "What does {} do?",
)
#: Subjects asked about three times as often: users try them first, and the model mixes them up easily.
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
    """The documents of one round, with special tokens: questions about all articles, and some passages."""
    texts = [render_conversation(talk) for talk in conversations(source, order)]
    passages = [article.passage for article in source if article.is_longer_than_its_answer]
    texts += map(render_passage, order.sample(passages, round(len(passages) * PASSAGE_SHARE)))
    order.shuffle(texts)
    return texts


def times_asked(article: Article) -> int:
    if not article.asked:
        return 0
    return 3 if article.title in FAMILIAR else 1


def conversations(source: list[Article], order: random.Random) -> list[Conversation]:
    """Conversations of one to three questions, with each `asked` article and some small talk."""
    exchanges = list(SMALL_TALK) * 2
    for article in source:
        for _ in range(times_asked(article)):
            subject = order.choice(article.subjects)
            exchanges.append((order.choice(QUESTIONS).format(subject), article.answer(subject)))
    order.shuffle(exchanges)
    talks = []
    while exchanges:
        turns = order.choice((1, 1, 1, 2, 3))
        talk: Conversation = [("system", order.choice(SYSTEM_PROMPTS))] if order.random() < 0.25 else []
        for question, answer in exchanges[:turns]:
            talk += [("user", question), ("assistant", answer)]
        del exchanges[:turns]
        talks.append(talk)
    return talks
