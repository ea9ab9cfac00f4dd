"""Asks for the order of one request, and prints which one ran. Needs `pip install openai`.

    python examples/ask_for_an_order.py http://127.0.0.1:8000 prefill_first "What is a list?"

The deployment must run prefill_first, decode_first or auto.
"""

from __future__ import annotations

import sys
from typing import Any

from openai import OpenAI


def ask(url: str, order: str, question: str, max_tokens: int = 40) -> tuple[str, str]:
    """Returns the answer and the order that ran."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = next(iter(client.models.list())).id
    nvext = {"annotations": [f"disagg:{order}"], "extra_fields": ["engine_data"]}
    answer: dict[str, Any] = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        extra_body={"nvext": nvext},
    ).to_dict()
    return answer["choices"][0]["message"]["content"], answer["nvext"]["engine_data"]["disagg"]["strategy"]


if __name__ == "__main__":
    _, url, order, question = sys.argv
    text, order = ask(url, order, question)
    print(text)
    print(f"({order})")
