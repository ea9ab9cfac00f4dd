"""Trains the weights: Muon for the matrices, AdamW for the rest, in bfloat16 where the CPU is good at it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trtllm_disagg.demo_model.conversations import documents
from trtllm_disagg.demo_model.corpus import Article
from trtllm_disagg.demo_model.recipe import Recipe
from trtllm_disagg.demo_model.tokenizer import BOS, EOS

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from torch.optim import Optimizer

# Called after every step with (step, steps, loss in nats per token).
Report = Callable[[int, int, float], None]


def train(recipe: Recipe, source: list[Article], tokenizer: Tokenizer, report: Report) -> Any:
    """A trained `LlamaForCausalLM` in float32. The same recipe on the same machine gives the same weights."""
    import torch

    data = training_tokens(recipe, source, tokenizer)
    with reproducible(recipe):
        model = new_model(recipe, tokenizer)
        optimizers = new_optimizers(recipe, model)
        for step in range(recipe.steps):
            scale_learning_rates(optimizers, recipe, step)
            loss = next_token_loss(model, windows(recipe, data, step))
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            report(step + 1, recipe.steps, loss.item())
    return model.eval()


def training_tokens(recipe: Recipe, source: list[Article], tokenizer: Tokenizer) -> Tensor:
    """(steps, batch, window) token ids: round after round of documents, packed without gaps."""
    import torch

    needed = recipe.steps * recipe.batch * recipe.window
    ids: list[int] = []
    order = random.Random(recipe.seed)
    while len(ids) < needed:
        for encoding in tokenizer.encode_batch(documents(source, order)):
            ids += encoding.ids
    return torch.tensor(ids[:needed]).view(recipe.steps, recipe.batch, recipe.window)


def windows(recipe: Recipe, data: Tensor, step: int) -> Tensor:
    """(rows, length) of one step: many short windows at first, one long one near the end."""
    long_from = recipe.steps * (1 - recipe.long_share)
    return data[step] if step < long_from else data[step].reshape(1, -1)


def new_model(recipe: Recipe, tokenizer: Tokenizer) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
    )
    return LlamaForCausalLM(config)


def new_optimizers(recipe: Recipe, model: Any) -> list[Optimizer]:
    import torch

    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_learning_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def scale_learning_rates(optimizers: list[Optimizer], recipe: Recipe, step: int) -> None:
    """Up over the warmup, then down in a straight line to zero."""
    scale = min(1.0, (step + 1) / recipe.warmup_steps) * (1 - step / recipe.steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = scale * group.setdefault("initial_lr", group["lr"])


def next_token_loss(model: Any, tokens: Tensor) -> Tensor:
    """Mean over all but the first token of each row; `tokens` is (rows, length)."""
    import torch

    with torch.autocast("cpu", torch.bfloat16, enabled=cpu_multiplies_bfloat16()):
        hidden = model.model(tokens[:, :-1]).last_hidden_state
        logits = model.lm_head(hidden)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def cpu_multiplies_bfloat16() -> bool:
    """Elsewhere bfloat16 is emulated, and slower than float32."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@contextmanager
def reproducible(recipe: Recipe) -> Iterator[None]:
    """Fixes the seed and the thread count, and gives the caller's own back afterwards."""
    import torch

    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        torch.set_num_threads(recipe.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
