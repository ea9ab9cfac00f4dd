"""Every family that is served answers what transformers' own generate answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.models import greedy_answer, write_checkpoint
from trtllm_disagg.engines.embedded.core import build as core_module
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import CpuFeatures, this_cpu
from trtllm_disagg.engines.embedded.model.forward import ForwardPlan
from trtllm_disagg.engines.embedded.params.model_config import FAMILIES, PLAIN_FAMILIES, read_config

#: 1: nothing but the last token; 32: one whole tile and block; 130: over five tiles, and over Mistral's window of 40.
LENGTHS = (1, 2, 31, 32, 33, 65, 130)
NEW_TOKENS = 16


def prompt(num_tokens: int) -> list[int]:
    return [2 + (i * 31 + i * i * 7 + num_tokens) % 250 for i in range(num_tokens)]


def generated_by_transformers(directory: Path) -> dict[int, list[int]]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return {length: greedy_answer(model, prompt(length), NEW_TOKENS) for length in LENGTHS}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(family: str, checkpoints: Checkpoints) -> dict[int, list[int]]:
    answers = generated_by_transformers(checkpoints(family))
    assert len({tuple(answer) for answer in answers.values()}) == len(LENGTHS), "the prompts must matter"
    return answers


#: (embedded.forward, CPU features): every implementation of `Forward`, and both of what lies between its products.
FORWARDS = {
    "torch": ("auto", CpuFeatures("torch")),
    "transformers": ("transformers", CpuFeatures("torch")),
} | (
    {"compiled": ("auto", this_cpu()), "transformers, compiled": ("transformers", this_cpu())}
    if this_cpu().compiles
    else {}
)


@pytest.fixture(scope="module", params=FORWARDS)
def engine(request: pytest.FixtureRequest, family: str, checkpoints: Checkpoints) -> Iterator[Core]:
    forward, cpu = FORWARDS[request.param]
    if forward == "auto" and family not in PLAIN_FAMILIES:
        pytest.skip("transformers' modules are the only forward that it has")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(core_module, "this_cpu", lambda: cpu)
        core = Core(
            checkpoints(family), max_num_tokens=64, enable_chunked_prefill=True, embedded={"forward": forward}
        )
    yield core
    core.assert_idle()
    core.close()


def test_greedy_tokens_are_those_of_transformers_when_all_run_together(
    engine: Core, expected: dict[int, list[int]]
) -> None:
    ids = {length: engine.add(prompt(length), NEW_TOKENS) for length in LENGTHS}
    engine.run(*ids.values())
    assert {length: engine.answers[i, 0].tokens for length, i in ids.items()} == expected


def test_transformers_modules_forward_gives_the_expected_tokens(
    family: str, checkpoints: Checkpoints, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated on the CPU: transformers' modules as they are, and torch's attention for decode rows too."""
    plan = ForwardPlan(read_config(checkpoints(family)), "modules", torch.float32)
    monkeypatch.setattr(core_module, "choose_forward", lambda *told: plan)
    core = Core(checkpoints(family), max_num_tokens=64, enable_chunked_prefill=True)
    ids = {length: core.add(prompt(length), NEW_TOKENS) for length in LENGTHS}
    core.run(*ids.values())
    assert {length: core.answers[i, 0].tokens for length, i in ids.items()} == expected
    core.assert_idle()
    core.close()


def served_as_transformers_does(directory: Path) -> bool:
    with closing(Core(directory)) as core:
        return {length: core.generate(prompt(length), NEW_TOKENS) for length in LENGTHS} == (
            generated_by_transformers(directory)
        )


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("mixtral", {"output_router_logits": True}),
        ("qwen3_moe", {"output_router_logits": True}),
        ("gemma2", {"return_dict": False}),
    ],
)
def test_settings_of_training_in_the_config_do_not_matter(
    family: str, setting: dict[str, Any], tmp_path: Path, checkpoints: Checkpoints
) -> None:
    model = write_checkpoint(tmp_path, family)
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | setting))
    with closing(Core(model)) as core, closing(Core(checkpoints(family))) as untouched:
        assert core.generate(prompt(33), NEW_TOKENS) == untouched.generate(prompt(33), NEW_TOKENS)


@pytest.mark.parametrize("kinds", [["full_attention"] * 4, ["full_attention", "sliding_attention"] * 2, None])
def test_a_mistral_with_layer_types_has_its_window_where_they_say_so(
    kinds: list[str] | None, tmp_path: Path
) -> None:
    """transformers reads it as a Ministral."""
    model = write_checkpoint(tmp_path, "mistral", sliding_window=8)
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"layer_types": kinds}))
    assert served_as_transformers_does(model)
