"""A model by its path, or by its Hugging Face name: found in the cache, or said in one sentence why not."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.conftest import Checkpoints
from trtllm_disagg.common.cli import run
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.common.model_directory import is_hub_name, model_directory, servable_model
from trtllm_disagg.engines.embedded import LLM, SamplingParams
from trtllm_disagg.errors import ConfigError

NAME = "acme/tiny-1.5"


class HubCache:
    """The layout of huggingface_hub's cache: blobs, a snapshot of links to them, and what `main` is."""

    def __init__(self, directory: Path) -> None:
        self.snapshot = directory / "models--acme--tiny-1.5" / "snapshots" / "0123abcd"

    def add(self, model: Path, without: tuple[str, ...] = ()) -> None:
        repository = self.snapshot.parents[1]
        for part in ("blobs", "refs"):
            (repository / part).mkdir(parents=True)
        self.snapshot.mkdir(parents=True)
        (repository / "refs" / "main").write_text(self.snapshot.name)
        for number, file in enumerate(each for each in model.iterdir() if each.name not in without):
            shutil.copy(file, repository / "blobs" / str(number))
            (self.snapshot / file.name).symlink_to(Path("../../blobs") / str(number))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return HubCache(tmp_path / "hub")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where no server listens, however often it is asked."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield url


def test_cached_hub_name_resolves_to_its_snapshot(cache: HubCache, checkpoints: Checkpoints) -> None:
    cache.add(checkpoints("llama"))
    assert model_directory(NAME) == servable_model(NAME) == cache.snapshot
    with LLM(model=NAME) as llm:
        output = llm.generate([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("revision", ["v2", "refs/pr/3", "0123abcd"])
def test_each_revision_has_its_snapshot(cache: HubCache, checkpoints: Checkpoints, revision: str) -> None:
    cache.add(checkpoints("llama"))
    refs = cache.snapshot.parents[1] / "refs"
    (refs / "main").write_text("another")
    if revision != cache.snapshot.name:
        (refs / revision).parent.mkdir(parents=True, exist_ok=True)
        (refs / revision).write_text(cache.snapshot.name)
    assert servable_model(NAME, revision=revision) == cache.snapshot


def test_an_engine_serves_the_revision_that_it_is_given(cache: HubCache, checkpoints: Checkpoints) -> None:
    cache.add(checkpoints("llama"))
    other = cache.snapshot.with_name("4567cdef")
    shutil.copytree(checkpoints("llama", seed=1), other)
    (cache.snapshot.parents[1] / "refs" / "v2").write_text(other.name)
    with LLM(model=NAME, revision="v2") as llm:
        assert llm.args.model == other


def test_an_engine_names_a_revision_that_is_not_there(cache: HubCache, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^model: .*has no {NAME} at revision v3"):
        LLM(model=NAME, revision="v3")
    with pytest.raises(ConfigError, match=r"^revision: 'v3' is not allowed; expected no value with the dir"):
        LLM(model=tmp_path, revision="v3")


def test_revision_of_a_local_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^--revision: 'v3' is not allowed; expected no value with the dir"
    ):
        model_directory(str(tmp_path), revision="v3")


@pytest.mark.parametrize("command", ["worker --disaggregation-mode agg", "up --strategy agg"])
def test_a_name_that_is_not_there_is_one_sentence_with_the_remedy(
    cache: HubCache, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    try:
        status = run([*command.split(), "--model", NAME])
        said = capfd.readouterr().err
    except ConfigError as error:
        status, said = ExitCode.WRONG_SETTING, str(error)
    assert status is ExitCode.WRONG_SETTING
    for part in (
        "--model: ",
        f"has no {NAME}",
        "HF_HUB_OFFLINE",
        f"run `hf download {NAME}`",
        "name a directory",
    ):
        assert part in said
    assert said.strip().count("\n") == 0


def test_a_hub_that_cannot_be_reached_is_named(cache: HubCache, unreachable: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--model: .* has no {NAME}, and {unreachable} does not give it .*hf download"
    ):
        model_directory(NAME)


def test_incomplete_snapshot_is_refused(cache: HubCache, checkpoints: Checkpoints) -> None:
    cache.add(checkpoints("llama"), without=("model.safetensors",))
    with pytest.raises(ConfigError, match=f"only a part of it, in {cache.snapshot}"):
        model_directory(NAME)


@pytest.mark.parametrize(
    ("model", "is_name"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("a/b_c.d-e", True),
        ("gpt2", False),
        ("./a/b", False),
        ("/a/b", False),
        ("a/b/c", False),
        ("a/", False),
        ("../b", False),
        ("there/model", False),
        ("there/none", False),
        ("models--a/b", False),
        ("a/b..c", False),
        ("a/b.git", False),
        ("a/b-", False),
        ("a/é", False),
        ("a/" + "b" * 96, True),
        ("a/" + "b" * 97, False),
    ],
)
def test_local_path_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, is_name: bool
) -> None:
    (tmp_path / "there" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(model) is is_name
    if not is_name:
        assert model_directory(model) == Path(model)


def test_a_directory_without_tokenizer_is_refused_before_anything_is_built(
    tmp_path: Path, checkpoints: Checkpoints
) -> None:
    copied = shutil.copytree(checkpoints("llama"), tmp_path / "model")
    os.remove(copied / "tokenizer.json")
    with pytest.raises(
        ConfigError, match=r"--model: '.*' is not allowed; .* tokenizer\.json, .* add the one"
    ):
        run(["worker", "--model", str(copied)])
    for each in ("tiktoken.model", "qwen.tiktoken", "tokenizer.json"):
        (copied / each).touch()
        assert servable_model(str(copied)) == copied
        os.remove(copied / each)


@pytest.mark.parametrize(
    ("make", "named"),
    [(False, "a directory that exists, or the name of a model on the Hugging"), (True, "config.json")],
)
def test_what_is_no_model_is_refused(tmp_path: Path, make: bool, named: str) -> None:
    if make:
        (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=f"--model: .*{named}"):
        servable_model(str(tmp_path / "model"))


@pytest.mark.parametrize("content", ["{", "[1]", b"\xff"])
def test_unreadable_tokenizer_config_is_refused(
    tmp_path: Path, checkpoints: Checkpoints, content: str | bytes
) -> None:
    """Dynamo's frontend would try again for ever."""
    copied = shutil.copytree(checkpoints("llama"), tmp_path / "model")
    file = copied / "tokenizer_config.json"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=r"--model: .* is not allowed; .* tokenizer_config\.json"):
        servable_model(str(copied))


@pytest.mark.parametrize(
    "model", ["~no_such_user/model", "x" * 5000, "/" + "x" * 5000, "x" * 300 + "/model", "x/" + "y" * 300]
)
def test_path_that_cannot_be_is_refused_by_the_flags_name(model: str, cache: HubCache) -> None:
    with pytest.raises(ConfigError, match="--model: "):
        servable_model(model)
