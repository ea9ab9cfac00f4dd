"""Translates a request's sampling options to TensorRT-LLM's SamplingParams."""

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
) -> Any:
    """`max_tokens` replaces the request's limit. Without `max_seq_len` the engine limits the answer. Raises
    InvalidRequestError.
    """
    options = _set_options(request.sampling)
    # OpenAI's "no limit" is -1, TensorRT-LLM's 0.
    if options.get("top_k") == -1:
        options["top_k"] = 0
    if "seed" in options:
        # A client may send any 64-bit number; TensorRT-LLM refuses those below 0.
        options["seed"] &= 2**63 - 1
    guided = options.pop("guided_decoding", None) or {}
    stop = request.stop
    if stop.max_thinking_tokens is not None:
        # Older TensorRT-LLM refuses it by name.
        options["thinking_token_budget"] = stop.max_thinking_tokens
    # TensorRT-LLM never returns the stop token.
    ignore_eos = bool(stop.ignore_eos or stop.stop_token_ids_visible or request.output.no_stop_trim)
    # `min_tokens` only delays TensorRT-LLM's end token. Dynamo's frontend looks for the client's ids after it.
    of_client = () if stop.min_tokens else stop.stop_token_ids or ()
    stop_ids = [] if ignore_eos else [*of_client, *(stop.stop_token_ids_hidden or ())]
    limit = max_tokens or stop.max_tokens
    if limit is None and max_seq_len is not None and request.has_known_length:
        limit = max(1, max_seq_len - request.num_prompt)
    try:
        return api.sampling_params(
            max_tokens=limit,
            min_tokens=stop.min_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_ids or None,
            logprobs=None if request.output.logprobs is None else max(1, request.output.logprobs),
            prompt_logprobs=request.output.prompt_logprobs if request.computes_prompt else None,
            # Dynamo's frontend detokenizes.
            detokenize=False,
            guided_decoding=_guided(api, guided) if guided else None,
            return_perf_metrics=measures,
            **options,
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(str(error)) from error


def _guided(api: LlmApi, guided: dict[str, Any]) -> Any:
    known = ("json", "regex", "grammar", "json_object", "structural_tag")
    # An empty schema is valid: it allows any JSON.
    chosen = {name: guided[name] for name in known if guided.get(name) not in (None, False, "")}
    if chosen.get("json") is True:
        # TensorRT-LLM's binding takes no truth value, so pass the same schema as a dict.
        chosen["json"] = {}
    if guided.get("choice"):
        # TensorRT-LLM has no guide for choices.
        chosen.setdefault("regex", "(" + "|".join(map(re.escape, guided["choice"])) + ")")
    if isinstance(chosen.get("structural_tag"), dict):
        chosen["structural_tag"] = json.dumps(chosen["structural_tag"])
    return api.guided_decoding_params(**chosen) if chosen else None


def _set_options(sampling: SamplingOptions) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(sampling).items() if value is not None}
