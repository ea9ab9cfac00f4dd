"""tools/pin_llm_api.py: TensorRT-LLM's LLM API, read from a source tree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[4] / "tools" / "pin_llm_api.py"

SOURCE = {
    "sampling_params.py": """
class GuidedDecodingParams:
    json: str | None = None
    _hidden: int = 3
    def _validate(self):
        raise ValueError("one")
""",
    "llmapi/llm_args.py": """
class BaseLlmArgs(Base):
    model: Union[str, Path] = Field(description="d")
    max_batch_size: Optional[int] = Field(default=2048, description="d")
class TorchLlmArgs(BaseLlmArgs):
    config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    max_batch_size: int = Field(default=7)
""",
    "llmapi/llm.py": """
class BaseLLM:
    def __init__(self, model: str, *, dtype: str = 'auto', **kwargs: Any): ...
    def _private(self, x): ...
    @property
    def tokenizer(self): ...
""",
    "executor/result.py": """
class GenerationResultBase:
    def __init__(self):
        self.id, self._done = 1, False
class GenerationResult(GenerationResultBase):
    async def aresult(self, timeout: float | None = None): ...
""",
    "llmapi/disagg_utils.py": "OTHER = 1",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tree = tmp_path_factory.mktemp("tree")
    for file, text in SOURCE.items():
        (tree / "tensorrt_llm" / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / "tensorrt_llm" / file).write_text(text)
    arguments = [tree, "--version", "9.9", "--source", "all=abc", "--out", tree]
    subprocess.run([sys.executable, TOOL, *map(str, arguments)], check=True, capture_output=True)
    read: dict[str, Any] = json.loads((tree / "9.9.json").read_text())
    return read


def test_the_program_reads_without_importing(made: dict[str, Any]) -> None:
    assert (made["version"], made["source"]) == ("9.9", {"all": "abc"})
    classes = made["classes"]
    assert classes["GuidedDecodingParams"]["fields"] == {"json": ["str | None", "None"]}
    assert classes["GuidedDecodingParams"]["raises"] == ["ValueError"]
    assert classes["LlmArgs"]["fields"] == {
        "model": ["Union[str, Path]", None],
        "max_batch_size": ["int", "7"],
        "config": ["KvCacheConfig", "KvCacheConfig()"],
    }
    assert classes["LLM"]["methods"] == {
        "__init__": {"model": ["str", None], "dtype": ["str", "'auto'"], "**kwargs": ["Any", None]}
    }
    assert classes["LLM"]["attributes"] == ["tokenizer"]
    assert classes["RequestOutput"]["methods"]["aresult"] == {"timeout": ["float | None", "None"]}
    assert classes["RequestOutput"]["attributes"] == ["id"]
    assert made["functions"] == {"get_global_disagg_request_id": None}


def test_pin_omits_classes_that_the_tree_lacks(made: dict[str, Any]) -> None:
    assert "DisaggregatedParams" not in made["classes"]


def test_a_folder_without_the_sources_is_refused(tmp_path: Path) -> None:
    arguments = [tmp_path, "--version", "9.9", "--source", "all=abc", "--out", tmp_path]
    done = subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode
    assert "has none of TensorRT-LLM's files" in done.stderr
    assert list(tmp_path.iterdir()) == []
