"""The key `modelled`: arguments of the modelled engine beside TensorRT-LLM's."""

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

#: Names for `model`, and what the tables call these.
MODELS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-70b-fp8": "nvidia/Llama-3.1-70B-Instruct-FP8",
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
    """Step times in place of the tables', for a GPU that was measured or is imagined: straight lines, in milliseconds.

    A step takes `step_ms`, for each prompt token `prefill_token_us`, for each prompt token and each 1024 tokens before
    it `prefill_context_us`, for each answer token `decode_token_us`, and for each 1024 tokens before that
    `decode_context_us`.
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
    #: One of `MODELS`, or ORGANISATION/NAME of the tables. None: the config.json of the directory `model`.
    model: str | None = Field(default=None, min_length=1)
    #: A GPU, by the tables' name.
    system: str = Field(default="h100_sxm", min_length=1)
    #: The version of TensorRT-LLM that the tables were measured with.
    backend_version: str = Field(default="1.3.0rc20", min_length=1)
    #: Number format of prefill attention. auto: as the tables infer it from the model.
    attention_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"
    #: Used instead of the tables.
    measured: MeasuredSteps | None = None
    #: Speed of each GPU's link for KV in each direction, 1e9 bytes a second. None: the tables' value between nodes.
    link_gb_per_second: PositiveFloat | None = None
    #: None: the tables' value.
    link_latency_us: NonNegativeFloat | None = None
    #: The modelled clock runs so many times slower than the wall's; below 1 it is faster.
    time_scale: float = Field(default=1.0, ge=0.1, le=1000.0)
    #: All step times of prefill, and of decode, are multiplied by it.
    prefill_factor: PositiveFloat = 1.0
    decode_factor: PositiveFloat = 1.0


def checked(given: Any) -> ModelledConfig:
    """The content of the key `modelled`. Raises ConfigError that names the key that does not fit."""
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
    """The arguments of LLM(...). More ways to divide the model among GPUs than on a CPU are allowed."""

    moe_tensor_parallel_size: int | None = Field(default=None, ge=-1)
    moe_expert_parallel_size: int | None = Field(default=None, ge=-1)
    enable_attention_dp: bool = False
    pipeline_parallel_size: Annotated[
        PositiveInt, Served(1, expected="1, since the tables have whole passes and not passes that overlap")
    ] = 1
    guided_decoding_backend: Annotated[
        Literal["xgrammar", "llguidance"] | None,
        Served(None, expected="no value, since no model follows a grammar"),
    ] = None
    modelled: ModelledConfig = Field(default_factory=ModelledConfig)
