"""Makes the training documents: conversations, which ask and answer, and passages, which just read on."""

from __future__ import annotations

import random

from trtllm_disagg.demo_model.corpus import Article
from trtllm_disagg.demo_model.tokenizer import Conversation, render_conversation, render_passage

# Conversations make the answers, passages the language; more of these leave too little time for those.
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
#: Asked three times as often: what a person tries first, and what is easily mixed up.
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
    """One round of reading, special tokens included: a question about everything, and some passages."""
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
    """A question about every article that is asked about, in one of several ways, some in longer talks."""
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
