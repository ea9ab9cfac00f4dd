"""NIXL is two packages, of which only the one for torch's CUDA reaches a GPU's memory."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from trtllm_disagg.engines.embedded.kv_transfer.nixl_package import nixl_api, require_package_for_gpus
from trtllm_disagg.errors import ConfigError


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, f"{name}._api", ModuleType(f"{name}._api"))


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(
    ("cuda", "module"),
    [("12.9", "nixl_cu12"), ("13.0", "nixl_cu13"), ("14.1", "nixl_cu12"), (None, "nixl_cu12")],
)
def test_of_two_packages_the_one_for_the_cuda_of_torch_is_used(
    cuda: str | None, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert nixl_api().__name__ == f"{module}._api"


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize("missing", ["nixl_cu12", "nixl_cu13"])
@pytest.mark.parametrize("cuda", ["12.9", "13.0", None])
def test_of_one_package_that_one_is_used(
    cuda: str | None, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setitem(sys.modules, f"{missing}._api", None)
    assert nixl_api().__name__ != f"{missing}._api"


def test_without_a_package_it_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, f"{name}._api", None)
    with pytest.raises(ImportError, match="nixl_cu1"):
        nixl_api()


@pytest.mark.parametrize(("cuda", "found", "needed"), [("13.0", "12", "13"), ("12.9", "13", "12")])
def test_the_package_for_another_cuda_is_refused_on_a_gpu(
    cuda: str, found: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    require_package_for_gpus(ModuleType(f"nixl_cu{needed}._api"))
    expected = f"'NIXL' is not allowed; .* torch's CUDA {cuda} .* pip install nixl-cu{needed}==1.5.1"
    with pytest.raises(ConfigError, match=expected):
        require_package_for_gpus(ModuleType(f"nixl_cu{found}._api"))


def test_a_cuda_that_no_package_is_for_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "14.1")
    with pytest.raises(ConfigError, match="'NIXL' is not allowed; expected torch for CUDA 12 or 13"):
        require_package_for_gpus(ModuleType("nixl_cu13._api"))
