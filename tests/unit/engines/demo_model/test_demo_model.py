"""`trtllm-disagg demo-model` with a recipe that takes a moment instead of a minute."""

from __future__ import annotations

import argparse
import functools
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_disagg.engines import demo_model
from trtllm_disagg.engines.demo_model import Recipe, building, corpus, training
from trtllm_disagg.engines.demo_model.building import build_demo_model
from trtllm_disagg.errors import ConfigError

TINY = Recipe(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    max_positions=256,
    window=32,
    batch=4,
    steps=6,
    warmup_steps=2,
    threads=1,
)
FILES = {
    "config.json",
    "demo_model.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_demo_model(tmp_path_factory.mktemp("demo") / "model", recipe=TINY)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Replaces the training by one small file; lists the recipes that were built."""
    built: list[Recipe] = []

    def make_model(directory: Path, recipe: Recipe) -> None:
        built.append(recipe)
        (directory / "config.json").write_text(str(recipe.seed))
        (directory / building.MARKER).write_text(json.dumps(recipe.marker()))

    monkeypatch.setattr(building, "make_model", make_model)
    return built


def weights(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(directory / "model.safetensors"))


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# What is made.


def test_demo_model_folder_has_all_files_readable(model_dir: Path) -> None:
    assert names(model_dir) == FILES
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in model_dir.iterdir())


def test_transformers_loads_the_demo_model_with_the_recipes_sizes(model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    config = model.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (320, 32, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (256, True)
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (0, 1)


def test_the_tokenizer_gives_every_text_back(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(model_dir)
    for text in ("The with statement", "  two  spaces\n\ttab", "żółw 🐢 \x00"):
        assert loaded.decode(loaded.encode(text)) == text
    assert loaded.convert_tokens_to_ids(list(corpus.SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert (loaded.bos_token, loaded.eos_token, len(loaded)) == ("<|bos|>", "<|eos|>", 320)


def test_the_chat_template_writes_what_the_model_was_trained_on_and_takes_text_parts(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(model_dir)
    talk = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye")]
    messages = [{"role": role, "content": text} for role, text in talk]
    rendered = loaded.apply_chat_template(messages, tokenize=False)
    assert rendered == corpus.render_conversation(talk)
    prompt = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == rendered + "<|assistant|>"
    assert rendered == "<|bos|><|system|>Be brief.<|user|>Hi<|assistant|>Hello!<|eos|><|user|>Bye"
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    rendered = loaded.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert rendered == "<|bos|><|user|>Hello"


def test_the_frontend_finds_template_and_special_tokens_in_tokenizer_config(model_dir: Path) -> None:
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["chat_template"] == corpus.CHAT_TEMPLATE
    assert {entry["content"] for entry in config["added_tokens_decoder"].values()} == set(
        corpus.SPECIAL_TOKENS
    )


# Training.


def test_the_same_recipe_gives_the_same_weights_and_another_seed_others(
    model_dir: Path, tmp_path: Path
) -> None:
    import torch

    torch.manual_seed(99)  # whatever the process did before must not matter
    again = build_demo_model(tmp_path / "again", recipe=TINY)
    other = build_demo_model(tmp_path / "other", recipe=replace(TINY, seed=1))
    assert same_weights(weights(model_dir), weights(again))
    assert not same_weights(weights(model_dir), weights(other))


def test_training_learns() -> None:
    source = corpus.articles()[:40]
    recipe = replace(TINY, steps=40, threads=2)
    vocabulary = corpus.train_tokenizer([article.passage for article in source], recipe.vocab_size)
    losses: list[float] = []
    training.train(recipe, source, vocabulary, lambda step, steps, loss: losses.append(loss))
    assert len(losses) == recipe.steps
    assert sum(losses[-5:]) / 5 < losses[0] - 1


# The folder.


def test_second_build_of_the_demo_model_returns_at_once(
    tmp_path: Path, stand_in: list[Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "a" / "model"
    assert build_demo_model(directory, recipe=TINY) == directory
    assert f"{directory} is ready" in capsys.readouterr().out
    assert build_demo_model(directory, recipe=TINY) == directory
    assert capsys.readouterr().out == f"demo-model: {directory} is up to date\n"
    assert stand_in == [TINY]


def test_another_recipe_replaces_the_model(tmp_path: Path, stand_in: list[Recipe]) -> None:
    directory = tmp_path / "model"
    build_demo_model(directory, recipe=TINY)
    (directory / "leftover").touch()
    build_demo_model(directory, recipe=replace(TINY, seed=7))
    assert (directory / "config.json").read_text() == "7"
    assert names(directory) == {"config.json", building.MARKER}
    assert names(tmp_path) == {"model", ".model.lock"}


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path: Path, stand_in: list[Recipe]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"DIR: .* is not allowed; expected a new or empty folder"):
        build_demo_model(tmp_path, recipe=TINY)
    with pytest.raises(ConfigError, match="DIR: "):
        build_demo_model(tmp_path / "thesis.txt", recipe=TINY)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    assert stand_in == []


@pytest.mark.parametrize("marker", ["", "[]", "{}", '{"digest": "of another recipe"}'])
def test_folder_with_a_damaged_marker_is_not_complete(
    tmp_path: Path, marker: str, stand_in: list[Recipe]
) -> None:
    (tmp_path / building.MARKER).write_text(marker)
    assert not building.is_complete(tmp_path, TINY)


def test_a_killed_build_leaves_no_model_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    directory = tmp_path / "model"
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", killed)
        with pytest.raises(KeyboardInterrupt):
            build_demo_model(directory, recipe=TINY)
    assert not directory.exists()
    build_demo_model(directory, recipe=TINY)
    assert names(directory) == FILES
    assert names(tmp_path) == {"model", ".model.lock"}


def test_two_builders_at_once_make_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def make_model(directory: Path, recipe: Recipe) -> None:
        built.append(directory)
        time.sleep(0.2)
        (directory / building.MARKER).write_text(json.dumps(recipe.marker()))

    monkeypatch.setattr(building, "make_model", make_model)
    directory = tmp_path / "model"
    build_it = functools.partial(build_demo_model, directory, recipe=TINY)
    builders = [threading.Thread(target=build_it) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(built) == 1
    assert names(directory) == {building.MARKER}


# The command.


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo_model.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_command_builds_the_default_recipe_or_the_one_that_sees(
    tmp_path: Path, stand_in: list[Recipe]
) -> None:
    assert demo_model.run(parse(str(tmp_path / "model"))) == 0
    assert demo_model.run(parse("--vision", str(tmp_path / "sees"))) == 0
    assert stand_in == [demo_model.DEFAULT_RECIPE, demo_model.VISION_RECIPE]


def test_a_folder_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path, stand_in: list[Recipe]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make a model at"):
        demo_model.run(parse(str(tmp_path / "file" / "model")))
