"""The key `modelled`: the modelled engine's arguments besides TensorRT-LLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs, Served
from trtllm_disagg.errors import ConfigError

#: Names for `model`, and the tables' names.
MODELS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-70b-fp8": "nvidia/Llama-3.1-70B-Instruct-FP8",
    "llama-3.3-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.3-70b-fp8": "nvidia/Llama-3.1-70B-Instruct-FP8",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-32b-fp8": "Qwen/Qwen3-32B-FP8",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3-235b-a22b-fp8": "Qwen/Qwen3-235B-A22B-FP8",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
}


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class MeasuredSteps(_Frozen):
    """Linear step times in place of the tables', for a measured or imagined GPU.

    A step takes `step_ms`, plus `prefill_token_us` per prompt token and `prefill_context_us` per 1024 tokens before it,
    plus `decode_token_us` per answer token and `decode_context_us` per 1024 tokens before it.
    """

    step_ms: NonNegativeFloat
    prefill_token_us: NonNegativeFloat
    prefill_context_us: NonNegativeFloat = 0.0
    decode_token_us: NonNegativeFloat = 0.0
    decode_context_us: NonNegativeFloat = 0.0
    #: KV capacity of the whole engine.
    kv_pool_tokens: PositiveInt
    kv_bytes_per_token: PositiveInt


class ModelledConfig(_Frozen):
    #: One of `MODELS`, or the tables' ORGANISATION/NAME. None: config.json in the directory `model`.
    model: str | None = Field(default=None, min_length=1)
    #: The tables' name of a GPU.
    system: str = Field(default="h100_sxm", min_length=1)
    #: The tables' version of TensorRT-LLM.
    backend_version: str = Field(default="1.3.0rc20", min_length=1)
    #: Number format of prefill attention. auto: the tables infer it from the model.
    attention_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"
    #: Replaces the tables.
    measured: MeasuredSteps | None = None
    #: Speed of each GPU's KV link in each direction, 1e9 bytes per second. None: the tables' value between nodes.
    link_gb_per_second: PositiveFloat | None = None
    #: None: the tables' value.
    link_latency_us: NonNegativeFloat | None = None
    #: Factor by which the modelled clock is slower than real time; below 1: faster.
    time_scale: float = Field(default=1.0, ge=0.1, le=1000.0)
    #: Factors on all step times of prefill and decode.
    prefill_factor: PositiveFloat = 1.0
    decode_factor: PositiveFloat = 1.0


def checked(given: Any) -> ModelledConfig:
    """The content of the key `modelled`. Raises ConfigError naming a wrong key."""
    try:
        return ModelledConfig.model_validate(given)
    except ValidationError as errors:
        first = errors.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, ("modelled", *first["loc"])))
        if first["type"] == "extra_forbidden":
            raise ConfigError.bad_value(
                key, first["input"], f"no such key; there are {', '.join(ModelledConfig.model_fields)}"
            ) from errors
        raise ConfigError.bad_value(
            key, first["input"], first["msg"].removeprefix("Input should be ")
        ) from errors


class ModelledArgs(LlmArgs):
    """The arguments of LLM(...), with more parallel sizes than CPUs have."""

    moe_tensor_parallel_size: int | None = Field(default=None, ge=-1)
    moe_expert_parallel_size: int | None = Field(default=None, ge=-1)
    enable_attention_dp: bool = False
    pipeline_parallel_size: Annotated[
        PositiveInt, Served(1, expected="1, since the tables have no overlapping passes")
    ] = 1
    guided_decoding_backend: Annotated[
        Literal["xgrammar", "llguidance"] | None,
        Served(None, expected="no value, since no model follows a grammar"),
    ] = None
    modelled: ModelledConfig = Field(default_factory=ModelledConfig)
