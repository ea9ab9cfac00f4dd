"""The training text: Python's own documentation, as every installation carries it.

Two kinds of documents come out of it. A passage is a section of the language reference as it stands. A conversation
asks about a section, a builtin or a module and answers with the opening of its text, so that the model learns where
an answer ends.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import random
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# One conversation: (role, text) in the order in which they were said.
Conversation = list[tuple[str, str]]

HEADING = re.compile(r"^(\S.*)\n([*=\-~^])\2{2,}\s*$")
CROSS_REFERENCE = re.compile(r"\s*\([Ss]ee (?:also )?(?:the )?sections? [^()]*\)")
BULLET = re.compile(r"^(\*|\d+\.) ")
UNREADABLE = ("::=", "---", "===", "+-")
REMARKS = ("Note:", "New in", "Changed in", "Deprecated since")
SIGNATURE = re.compile(r"^[\w.]+\(.*\)( -> .*)?$")
CODE_LINES = 12
ANSWER_CHARS = 600
PASSAGE_CHARS = 1500

MODULES = [
    "asyncio",
    "bisect",
    "collections",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "enum",
    "functools",
    "glob",
    "heapq",
    "itertools",
    "json",
    "math",
    "os.path",
    "pathlib",
    "pickle",
    "queue",
    "random",
    "re",
    "secrets",
    "shutil",
    "string",
    "subprocess",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "zlib",
]
TYPES = (str, list, dict)

SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer questions about Python.", "Be brief.")
QUESTIONS = (
    "What is {}?",
    "What is {}?",
    "Explain {}.",
    "Tell me about {}.",
    "How does {} work?",
    "What does {} do?",
)
GREETINGS: tuple[tuple[str, str], ...] = (
    ("Hello!", "Hello! Ask me something about Python."),
    ("Hi", "Hi! What would you like to know about Python?"),
    ("Hello, how are you?", "I am fine, thank you. What would you like to know about Python?"),
    (
        "Who are you?",
        "I am a small demo model. I was trained for a minute on the documentation of Python, so please do not believe "
        "everything that I say.",
    ),
    (
        "What can you do?",
        "I can answer short questions about the Python language, its statements, its types and its standard library.",
    ),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    (
        "What is Python?",
        "Python is a programming language. Programs are made of statements, which work with objects: all data in a "
        "Python program is represented by objects or by relations between objects.",
    ),
    (
        "What is your name?",
        "I am the demo model. I have no other name.",
    ),
    (
        "Tell me a story",
        "Once upon a time there was a small language model. It read the documentation of Python for one minute, and "
        "it has been answering questions about it ever since.",
    ),
    ("Say hello", "Hello!"),
    ("Count to ten", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
)


@dataclass(frozen=True)
class Article:
    """A titled piece of documentation. `subjects` is how a question may name it; paragraphs hold no line wraps.

    Only the best known pieces are `asked` about: in a minute, a model learns a few answers well or many badly.
    """

    title: str
    subjects: tuple[str, ...]
    paragraphs: tuple[str, ...]
    asked: bool = True

    @property
    def passage(self) -> str:
        return "\n\n".join((self.title, *opening(self.paragraphs, PASSAGE_CHARS)))

    def answer(self, subject: str) -> str:
        """Repeats the subject: copying it from the question is what ties the two together early in training."""
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
    """All documentation that is worth asking about, in an order that depends on nothing but the Python version."""
    return [*language_reference(), *builtin_docs(), *module_docs()]


def language_reference() -> Iterator[Article]:
    from pydoc_data.topics import topics

    sections: dict[str, list[str]] = {}
    seen: set[str] = set()
    asked: set[str] = set()
    for label in sorted(topics):
        title = ""
        for paragraph in split_paragraphs(topics[label]):
            if heading := HEADING.match(paragraph):
                if not title:
                    asked.add(heading[1].strip())
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
            yield Article(title, spoken(title), tuple(paragraphs), title in asked)


def drop_announcement(section: list[str]) -> None:
    """Removes a last sentence such as "The syntax is:" when what it announces is left out."""
    if section and section[-1].endswith(":"):
        kept, stop, _ = section.pop().rpartition(". ")
        if stop:
            section.append(f"{kept}.")


def spoken(title: str) -> tuple[str, ...]:
    """A heading as it would stand inside a question, without and with its quotation marks."""
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
            yield from docstring_article(value, name, f"a {name}", f"the {name} type")
        elif inspect.isroutine(value):
            yield from docstring_article(value, name, f"{name}()", f"the {name} function")
    for kind in TYPES:
        for name, value in sorted(vars(kind).items()):
            if not name.startswith("_") and inspect.isroutine(value):
                yield from docstring_article(value, f"{kind.__name__}.{name}", f"{kind.__name__}.{name}()")


def module_docs() -> Iterator[Article]:
    for name in MODULES:
        yield from docstring_article(importlib.import_module(name), name, f"the {name} module")


def docstring_article(value: object, title: str, *more_subjects: str) -> Iterator[Article]:
    paragraphs = [unwrap(part) for part in split_paragraphs(inspect.getdoc(value) or "")]
    # Old docstrings open with a signature, which is no sentence.
    paragraphs = [part for part in paragraphs if part and not SIGNATURE.match(part)]
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


def conversations(source: list[Article], order: random.Random) -> list[Conversation]:
    """One question about every article, each put in one of several ways, some of them grouped into longer talks."""
    exchanges = []
    for article in source:
        if article.asked:
            subject = order.choice(article.subjects)
            exchanges.append((order.choice(QUESTIONS).format(subject), article.answer(subject)))
    exchanges += GREETINGS * 2
    order.shuffle(exchanges)
    talks: list[Conversation] = []
    while exchanges:
        turns = order.choice((1, 1, 1, 2, 3))
        talk: Conversation = [("system", order.choice(SYSTEM_PROMPTS))] if order.random() < 0.25 else []
        for question, answer in exchanges[:turns]:
            talk += [("user", question), ("assistant", answer)]
        del exchanges[:turns]
        talks.append(talk)
    return talks
