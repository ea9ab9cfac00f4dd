"""What guided decoding needs to know of a model's tokenizer, read without transformers where that is safe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trtllm_disagg.embedded.checkpoint import read_json
from trtllm_disagg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GuideTokenizer:
    #: The content of a tokenizer.json.
    text: str
    #: How many tokens it knows, added ones too.
    size: int
    eos_token_id: int | None


def read_guide_tokenizer(directory: Path) -> GuideTokenizer:
    """transformers takes a second and 100 MB to read the same. It is asked when tokenizer.json is not all there is
    to know. Raises ConfigError for a tokenizer that cannot guide.
    """
    file, config = directory / "tokenizer.json", _settings(directory)
    if not file.exists():
        return _read_with_transformers(directory)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise ConfigError(f"guided_decoding_backend: cannot read {file}: {error}") from error
    if not _knows(tokenizer, config.get("added_tokens_decoder")):
        return _read_with_transformers(directory)
    end = config.get("eos_token")
    content = end.get("content") if isinstance(end, dict) else end
    return _of(tokenizer, tokenizer.token_to_id(content) if isinstance(content, str) else None)


def _settings(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    return read_json(file) if file.exists() else {}


def _knows(tokenizer: Tokenizer, added: Any) -> bool:
    """Some list tokens in tokenizer_config.json that tokenizer.json lacks."""
    return not added or (
        isinstance(added, dict)
        and all(
            isinstance(token, dict) and tokenizer.id_to_token(int(number)) == token.get("content")
            for number, token in added.items()
        )
    )


def _read_with_transformers(directory: Path) -> GuideTokenizer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if not tokenizer.is_fast:
        raise ConfigError(
            f"guided_decoding_backend: {directory} has a slow tokenizer; a tokenizer.json is needed"
        )
    return _of(Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), tokenizer.eos_token_id)


def _of(tokenizer: Tokenizer, end: int | None) -> GuideTokenizer:
    # llguidance tokenizes single pieces of text.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return GuideTokenizer(tokenizer.to_str(), tokenizer.get_vocab_size(with_added_tokens=True), end)
