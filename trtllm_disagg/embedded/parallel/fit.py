"""Can this model be divided among so many ranks? Asked before anything is built; nothing heavy is imported."""

from __future__ import annotations

from pathlib import Path

from trtllm_disagg.embedded.checkpoint import read_json
from trtllm_disagg.errors import ConfigError

KEY = "tensor_parallel_size"
#: Keys of config.json whose numbers every rank gets an equal part of, and what they count.
_DIVIDED = {
    "num_key_value_heads": "KV heads",
    "num_attention_heads": "attention heads",
    "hidden_size": "hidden dimensions",
    "intermediate_size": "feed-forward dimensions",
    "moe_intermediate_size": "feed-forward dimensions of an expert",
    "shared_expert_intermediate_size": "feed-forward dimensions of the shared expert",
}


def require_divides(directory: Path, size: int) -> None:
    """Raise ConfigError when the model's heads or dimensions cannot be shared out evenly among `size` ranks, or
    when there is no model.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError.bad_value("model", str(directory), "a directory with a config.json")
    config = read_json(directory / "config.json")
    for key, noun in _DIVIDED.items():
        count = config.get(key)
        if isinstance(count, int) and count % size:
            raise ConfigError.bad_value(
                KEY, size, f"a divisor of the model's {count} {noun} (config.json {key})"
            )
