"""Writes the same random weights in the format of each contestant, once, into the cache directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtllm_disagg.tools.bench.models import Size, random_checkpoint

DEFAULT_DIRECTORY = Path(".cache/bench-engine")


def safetensors(cache: Path, size: Size, dtype: str) -> Path:
    """float32 whatever `dtype` is: an engine that runs bfloat16 rounds it while loading."""
    directory = random_checkpoint(cache / size.name, size.settings)
    if not (directory / "tokenizer.json").exists():
        _write_tokenizer(directory, size.vocab_size)
    return directory


def gguf(cache: Path, size: Size, dtype: str) -> Path:
    """llama.cpp's file: rows of Q and K in its rotary order, norms in float32."""
    source = safetensors(cache, size, dtype)
    path = cache / f"{size.name}-{dtype}.gguf"
    if not _is_newer(path, source):
        scratch = path.with_suffix(".part")
        _write_gguf(scratch, source, size, dtype)
        scratch.replace(path)
    return path


def ctranslate2(cache: Path, size: Size, dtype: str) -> Path:
    """CTranslate2's directory, from its own converter."""
    source = safetensors(cache, size, dtype)
    directory = cache / f"{size.name}-ctranslate2"
    if not _is_newer(directory / "model.bin", source):
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(source)).convert(str(directory), force=True)
    return directory


def _is_newer(file: Path, source: Path) -> bool:
    return file.exists() and file.stat().st_mtime >= (source / "model.safetensors").stat().st_mtime


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Writes a tokenizer for CTranslate2, which takes words instead of token ids (see _words)."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(_words(vocab_size))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t0", eos_token="t1", pad_token="t2", unk_token="t2"
    ).save_pretrained(directory)


def _words(vocab_size: int) -> list[str]:
    """The word of each token: "t7" is token 7."""
    return [f"t{token}" for token in range(vocab_size)]


_ROPE_BASE = 10000.0
_NORM_EPS = 1e-6


def _write_gguf(path: Path, source: Path, size: Size, dtype: str) -> None:
    import gguf
    import numpy as np
    from gguf.gguf_writer import logger
    from safetensors.numpy import load_file

    logger.setLevel("WARNING")
    settings = size.settings
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(size.name)
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(_NORM_EPS)
    writer.add_rope_dimension_count(settings["hidden_size"] // heads)
    writer.add_rope_freq_base(_ROPE_BASE)
    writer.add_vocab_size(size.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(_words(size.vocab_size))
    writer.add_token_scores([0.0] * size.vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * size.vocab_size)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_file_type({"float32": 0, "bfloat16": 32}[dtype])

    def put(name: str, weight: Any) -> None:
        if weight.ndim == 1 or dtype == "float32":
            writer.add_tensor(name, np.ascontiguousarray(weight, np.float32))
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, settings["num_hidden_layers"])
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, heads if "q_proj" in name else kv_heads)
        put(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: Any, heads: int) -> Any:
    """A head's rows with the two halves of each rotated pair side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
