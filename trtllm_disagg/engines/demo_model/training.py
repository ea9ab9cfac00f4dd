"""Trains a demo model. Importing this module loads torch, which takes seconds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from trtllm_disagg.engines.demo_model.corpus import ASSISTANT, BOS, EOS, SYSTEM, USER, Article, documents
from trtllm_disagg.engines.demo_model.recipe import Recipe
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Coefficients of x, x^3 and x^5 for each step, optimal for the range of singular values that earlier steps leave
#: (Amsel et al., "The Polar Express", 2025), with the paper's margin of 1 %.
_POLYNOMIALS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
)
_MOMENTUM = 0.95
# Called after every step with (step, steps, loss in nats per token).
Report = Callable[[int, int, float], None]


class Muon(torch.optim.Optimizer):
    """An optimizer for matrices: all singular values of an update are near one."""

    def __init__(self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in self.param_groups[0]["params"]:
            self._by_shape.setdefault(matrix.shape, []).append(matrix)
        self._averages = {shape: torch.zeros(len(same), *shape) for shape, same in self._by_shape.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Every matrix must have a gradient; there is no closure."""
        group = self.param_groups[0]
        for shape, matrices in self._by_shape.items():
            gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
            average = self._averages[shape].lerp_(gradients, 1 - _MOMENTUM)
            updates = orthogonal(gradients.lerp_(average, _MOMENTUM))
            size = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
            for matrix, update in zip(matrices, updates, strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-size)


def orthogonal(matrices: Tensor) -> Tensor:
    """`matrices` (n, rows, columns) with singular values moved near one.

    Applies the polynomials to the small square X X^T, and their product once to X.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        wide: Tensor = orthogonal(matrices.mT).mT
        return wide
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    square = x @ x.mT
    product = _factor(square, *_POLYNOMIALS[0])
    last = product
    for coefficients in _POLYNOMIALS[1:]:
        square = last @ square @ last
        last = _factor(square, *coefficients)
        product = last @ product
    made: Tensor = product @ x
    return made


def _factor(square: Tensor, a: float, b: float, c: float) -> Tensor:
    """a + b S + c S S."""
    factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    return factor


class Batch(NamedTuple):
    """One step: token ids (rows, length), and True (rows, length) for those to predict."""

    tokens: Tensor
    is_said: Tensor


def train(recipe: Recipe, source: list[Article], tokenizer: Tokenizer, report: Report) -> Any:
    """A trained float32 `LlamaForCausalLM`. One recipe on one machine always gives the same weights."""
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    model = new_model(recipe, tokenizer)
    lessons = batches(recipe, endless_documents(recipe, source, tokenizer), tokenizer)
    descend(recipe, model, (next_token_loss(model, batch) for batch in lessons), report)
    return model.eval()


def descend(recipe: Recipe, model: Any, losses: Iterator[Tensor], report: Report) -> None:
    """Take a step down each loss, for all of the model's parameters that have a gradient.

    `losses` must be lazy: each one is of the weights that the step before left.
    """
    optimizers = new_optimizers(recipe, model)
    for step, loss in enumerate(losses):
        scale_learning_rates(optimizers, recipe, step)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        report(step + 1, recipe.steps, loss.item())


def batches(recipe: Recipe, encoded: Iterator[list[int]], tokenizer: Tokenizer) -> Iterator[Batch]:
    """A batch per step, over endless documents. In some steps all tokens are one window."""
    user, system, assistant = (id_of(mark, tokenizer) for mark in (USER, SYSTEM, ASSISTANT))
    for step in range(1, recipe.steps + 1):
        rows, length = recipe.shape_of(step)
        windows = [window(encoded, length) for _ in range(rows)]
        is_said = [said(tokens, [user, system], assistant) for tokens in windows]
        yield Batch(torch.tensor(windows), torch.tensor(is_said))


def endless_documents(recipe: Recipe, source: list[Article], tokenizer: Tokenizer) -> Iterator[list[int]]:
    order = random.Random(recipe.seed)
    while True:
        for encoding in tokenizer.encode_batch(documents(source, order)):
            yield encoding.ids


def id_of(mark: str, tokenizer: Tokenizer) -> int:
    found = tokenizer.token_to_id(mark)
    assert found is not None
    return found


def window(encoded: Iterator[list[int]], length: int) -> list[int]:
    """Starts with a document, so that no answer lacks its question; cuts the last document."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += next(encoded)
    return tokens[:length]


def said(tokens: list[int], questions: list[int], answers: int) -> list[bool]:
    """True for all tokens except those of users and system prompts, which cannot be predicted."""
    is_said, speaks = [], True
    for token in tokens:
        if token in questions:
            speaks = False
        is_said.append(speaks and token != answers)
        if token == answers:
            speaks = True
    return is_said


def new_model(recipe: Recipe, tokenizer: Tokenizer) -> Any:
    model = LlamaForCausalLM(text_config(recipe, tokenizer))
    start_without_effect(model.model.layers)
    return model


def text_config(recipe: Recipe, tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
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


def start_without_effect(layers: Iterable[Any]) -> None:
    """Llama's layers then learn output projections before other weights."""
    for layer in layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)


def new_optimizers(recipe: Recipe, model: Any) -> list[Optimizer]:
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        Muon(matrices, lr=recipe.matrix_learning_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def scale_learning_rates(optimizers: list[Optimizer], recipe: Recipe, step: int) -> None:
    """Up over the warmup, then full, then linearly down to zero."""
    falling = max(0.0, step / recipe.steps - recipe.full_share) / (1 - recipe.full_share)
    scale = min(1.0, (step + 1) / recipe.warmup_steps) * (1 - falling)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = scale * group.setdefault("initial_lr", group["lr"])


def next_token_loss(model: Any, batch: Batch) -> Tensor:
    """Mean cross entropy of the tokens to predict, excluding each row's first."""
    with torch.autocast("cpu", torch.bfloat16, enabled=this_cpu().has_bfloat16):
        hidden = model.model(batch.tokens[:, :-1]).last_hidden_state
        is_said = batch.is_said[:, 1:]
        logits = model.lm_head(hidden[is_said])
    return torch.nn.functional.cross_entropy(logits.float(), batch.tokens[:, 1:][is_said])


def save_weights(model: Any, directory: Path) -> None:
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    # safetensors makes files that only this user can read, but the frontend may run as another.
    (directory / "model.safetensors").chmod(0o644)
