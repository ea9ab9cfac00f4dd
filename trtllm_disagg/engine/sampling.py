"""Translates the sampling options of a request to TensorRT-LLM's SamplingParams."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from trtllm_disagg.engine.llm_api import LlmApi
from trtllm_disagg.errors import InvalidRequestError
from trtllm_disagg.types import GenerateRequest, SamplingOptions


def sampling_params_of(
    api: LlmApi,
    request: GenerateRequest,
    max_tokens: int | None,
    max_seq_len: int | None,
    *,
    measures: bool = False,
    engine_args: Any = None,
) -> Any:
    """`max_tokens` replaces the request's own limit. Without `max_seq_len` the engine limits the answer itself.
    `engine_args`: those of the LLM, where they are known. Raises InvalidRequestError.
    """
    _require_places(request.num_choices, engine_args)
    options = _set_options(request.sampling)
    if options.get("n", 1) > 1:
        # TensorRT-LLM generates `best_of` answers, and returns `n` of them.
        options["best_of"] = options["n"]
    # -1 is OpenAI's way to say "no limit"; TensorRT-LLM's is 0.
    if options.get("top_k") == -1:
        options["top_k"] = 0
    if "seed" in options:
        # A client may send any number of 64 bits; TensorRT-LLM takes none below 0.
        options["seed"] &= 2**63 - 1
    guided = options.pop("guided_decoding", None) or {}
    stop = request.stop
    if stop.max_thinking_tokens is not None:
        # Older versions of TensorRT-LLM refuse it with an error that names it.
        options["thinking_token_budget"] = stop.max_thinking_tokens
    # TensorRT-LLM never returns the token that it stops at.
    ignore_eos = bool(stop.ignore_eos or stop.stop_token_ids_visible or request.output.no_stop_trim)
    # `min_tokens` puts off TensorRT-LLM's end token only. Dynamo's frontend looks for the client's ids after it.
    of_client = () if stop.min_tokens else stop.stop_token_ids or ()
    stop_ids = [] if ignore_eos else [*of_client, *(stop.stop_token_ids_hidden or ())]
    room = None if max_seq_len is None else max(1, max_seq_len - len(request.token_ids))
    try:
        return api.sampling_params(
            max_tokens=max_tokens or (room if stop.max_tokens is None else stop.max_tokens),
            min_tokens=stop.min_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_ids or None,
            logprobs=None if request.output.logprobs is None else max(1, request.output.logprobs),
            prompt_logprobs=request.output.prompt_logprobs if request.computes_prompt else None,
            # Dynamo's frontend makes the text.
            detokenize=False,
            guided_decoding=_guided(api, guided),
            return_perf_metrics=measures,
            **options,
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(str(error)) from error


def _require_places(num_choices: int, engine_args: Any) -> None:
    """TensorRT-LLM would accept more choices than a step has places for, and never begin, nor what comes after them."""
    most = getattr(engine_args, "max_batch_size", None)
    if most is not None and num_choices > most:
        raise InvalidRequestError(f"n={num_choices} is not allowed; expected at most max_batch_size, {most}")


def _guided(api: LlmApi, guided: dict[str, Any]) -> Any:
    known = ("json", "regex", "grammar", "json_object", "structural_tag")
    # An empty schema is valid, too: it allows any JSON.
    chosen = {name: guided[name] for name in known if guided.get(name) not in (None, False, "")}
    if chosen.get("json") is True:
        # The same schema as a dict: TensorRT-LLM's binding takes no truth value.
        chosen["json"] = {}
    if guided.get("choice"):
        # TensorRT-LLM has no choice of its own.
        chosen.setdefault("regex", "(" + "|".join(map(re.escape, guided["choice"])) + ")")
    if isinstance(chosen.get("structural_tag"), dict):
        chosen["structural_tag"] = json.dumps(chosen["structural_tag"])
    return api.guided_decoding_params(**chosen) if chosen else None


def _set_options(sampling: SamplingOptions) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(sampling).items() if value is not None}
