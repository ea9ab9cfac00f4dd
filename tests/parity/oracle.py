"""What the right answer is: the embedded engine asked directly, without Dynamo, handlers or handoffs."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from tests.parity.answers import Answer, Question, TokenLogprob, Usage, float32
from tests.support.deployments import DEMO_CONFIGS
from trtllm_disagg.engines.embedded import LLM, GuidedDecodingParams, RequestOutput, SamplingParams

#: Options with the same name and meaning in OpenAI's API, as Dynamo extends it, and in SamplingParams.
_SAME = (
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def images_in(question: Question) -> list[Image.Image]:
    """The images of a chat, from its data URLs."""
    parts = [part for each in question.prompt if isinstance(each, dict) for part in each["content"]]
    urls = [part["image_url"]["url"] for part in parts if isinstance(part, dict) and "image_url" in part]
    return [Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB") for url in urls]


class Oracle:
    def __init__(self, model: Path) -> None:
        args = yaml.safe_load((DEMO_CONFIGS / "agg.yaml").read_text())
        self.max_seq_len: int = args["max_seq_len"]
        self._llm = LLM(model=str(model), **args)
        assert self._llm.input_processor is not None
        self._processor = self._llm.input_processor

    def close(self) -> None:
        self._llm.shutdown()

    @property
    def image_token(self) -> int:
        return int(self._processor.get_mm_token_ids()[0])

    def prompt_ids(self, question: Question) -> list[int]:
        tokenizer = self._llm.tokenizer
        if question.api == "chat":
            encoded = tokenizer.apply_chat_template(
                question.prompt, add_generation_prompt=True, return_dict=True
            )
            return [int(token) for token in encoded["input_ids"]]
        if isinstance(question.prompt, str):
            return [int(token) for token in tokenizer.encode(question.prompt, add_special_tokens=False)]
        return list(question.prompt)

    def text(self, token_ids: list[int]) -> str:
        return str(self._llm.tokenizer.decode(token_ids, skip_special_tokens=True))

    def answer(self, question: Question) -> Answer:
        prompt = self.prompt_ids(question)
        images = images_in(question)
        length = len(prompt) + sum(
            self._processor.get_num_tokens_per_image(image=each) - 1 for each in images
        )
        inputs: Any = prompt
        if images:
            inputs = {"prompt_token_ids": prompt, "multi_modal_data": {"image": images}}
        result = self._llm.generate(
            inputs, self._sampling(question, length), cache_salt=question.salt or None
        )
        assert isinstance(result, RequestOutput)
        output = result.outputs[0]
        count, text, finish_reason = self._until_stop(question, list(output.token_ids))
        return Answer(
            text=text,
            token_ids=tuple(output.token_ids[:count]),
            finish_reason=finish_reason or output.finish_reason,
            logprobs=_logprobs(output, count),
            usage=Usage(length, count, length + count, None if finish_reason else result.cached_tokens),
        )

    def _sampling(self, question: Question, num_prompt: int) -> SamplingParams:
        options: dict[str, Any] = {name: question.options[name] for name in _SAME if name in question.options}
        # Dynamo's frontend keeps such numbers as float32.
        options = {name: float32(v) if isinstance(v, float) else v for name, v in options.items()}
        options.setdefault("max_tokens", self.max_seq_len - num_prompt)
        wanted = "top_logprobs" if question.api == "chat" else "logprobs"
        schema = question.options.get("guided_json")
        guide = GuidedDecodingParams(json=schema) if schema else None
        return SamplingParams(logprobs=question.options.get(wanted), guided_decoding=guide, **options)

    def _until_stop(self, question: Question, tokens: list[int]) -> tuple[int, str, str | None]:
        """(tokens that count, text, "stop" when a stop string came up). Dynamo's frontend looks for these."""
        stop = question.options.get("stop")
        if stop is not None:
            for count in range(1, len(tokens) + 1):
                text = self.text(tokens[:count])
                if stop in text:
                    return count, text[: text.index(stop)], "stop"
        return len(tokens), self.text(tokens), None


def _logprobs(output: Any, count: int) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token, float32(entry[token].logprob), {top: float32(lp.logprob) for top, lp in entry.items()}
        )
        for token, entry in zip(output.token_ids[:count], output.logprobs, strict=False)
    )
