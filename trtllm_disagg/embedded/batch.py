"""`LLM.generate`: one prompt or many, each with arguments of its own when they come as a list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from trtllm_disagg.embedded.result import RequestOutput


def generate_all(
    start: Callable[..., RequestOutput], inputs: Any, use_tqdm: bool, arguments: dict[str, Any]
) -> Any:
    """`start` takes one prompt and its arguments. One result for one prompt, a list for a list of prompts.

    Raises ValueError when a list of arguments is not as long as that of the prompts, and what `start` and the
    requests raise; then none of the others goes on.
    """
    several = isinstance(inputs, list) and not all(isinstance(token, int) for token in inputs)
    prompts = inputs if several else [inputs]
    each = list(_one_by_one(arguments, len(prompts)))
    results: list[RequestOutput] = []
    # None: only where somebody looks.
    shown = tqdm(total=len(prompts), desc="Processed requests", disable=None if use_tqdm else True)
    try:
        with shown:
            for prompt, mine in zip(prompts, each, strict=True):
                results.append(start(prompt, **mine))
            for result in results:
                result.result()
                shown.update()
    except BaseException:
        for result in results:
            result.abort()
        raise
    return results if several else results[0]


def _one_by_one(arguments: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    for name, value in arguments.items():
        if isinstance(value, list) and len(value) != count:
            raise ValueError(f"{name}: {len(value)} of them for {count} prompts")
    for i in range(count):
        yield {name: value[i] if isinstance(value, list) else value for name, value in arguments.items()}
