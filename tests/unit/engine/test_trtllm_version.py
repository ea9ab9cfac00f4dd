"""Versions of TensorRT-LLM compare as pip has them."""

from __future__ import annotations

import pytest

from trtllm_disagg.engine.trtllm_version import NEWEST_KNOWN, OLDEST_SERVED, TrtllmVersion, installed_version
from trtllm_disagg.errors import ConfigError

IN_ORDER = ["1.2.1", "1.3.0rc5", "1.3.0rc5.post1", "1.3.0rc9", "1.3.0rc22", "1.3.0", "1.4.0rc1"]


def test_versions_sort_in_order_of_release() -> None:
    versions = [TrtllmVersion.parse(text) for text in IN_ORDER]
    backwards = versions[::-1]
    assert sorted(backwards) == versions
    assert [str(version) for version in versions] == IN_ORDER
    assert TrtllmVersion.parse("1.3.0rc29+cu13") == NEWEST_KNOWN > OLDEST_SERVED


@pytest.mark.parametrize("text", ["", "1.3", "newest", "v1.3.0"])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--trtllm-version.*such as 1\.3\.0rc29"):
        TrtllmVersion.parse(text)


def test_version_without_tensorrt_llm_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert installed_version() is None
    monkeypatch.setattr(metadata, "version", lambda name: "1.3.0rc29")
    assert installed_version() == "1.3.0rc29"
