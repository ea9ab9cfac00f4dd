"""Does this engine guide? What guiding needs is imported only where it does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.embedded.model.model_loader import ModelShape
from trtllm_disagg.embedded.params.llm_args import LlmArgs
from trtllm_disagg.errors import InvalidRequestError

if TYPE_CHECKING:
    from trtllm_disagg.embedded.guided_decoding.guides import Guides


class NoGuides:
    """guided_decoding_backend is not set."""

    def start(self, sampling: SamplingSpec) -> None:
        if sampling.grammar is not None:
            raise InvalidRequestError("guided decoding needs guided_decoding_backend, which is not set")


def create_guides(args: LlmArgs, shape: ModelShape) -> Guides | NoGuides:
    if args.guided_decoding_backend is None:
        return NoGuides()
    from trtllm_disagg.embedded.guided_decoding.guides import Guides, read_guide_tokenizer

    tokenizer = read_guide_tokenizer(Path(args.tokenizer or args.model))
    return Guides(tokenizer, shape.config.vocab_size, shape.end_ids)
