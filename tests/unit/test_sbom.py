"""The SBOM of a release: what a user installs, and nothing of the machine that it was made on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.release import installed_to_run

PYPI = {"type": "website", "url": "https://example.org"}
LOCAL = {"type": "distribution", "url": "file:///home/me/Some.Lib-1.whl"}


def component(name: str, version: str = "1", *references: dict[str, str]) -> dict[str, Any]:
    ref = f"{name}=={version}"
    return {
        "bom-ref": ref,
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name.lower()}@{version}?download_url=file:///home/me/x.whl",
        "externalReferences": list(references),
    }


SBOM = {
    "metadata": {"component": {"bom-ref": "root-component", "name": "trtllm-disagg"}},
    "components": [component("Some.Lib", "1", PYPI, LOCAL), component("pytest"), component("rich")],
    "dependencies": [
        {"ref": "root-component", "dependsOn": ["Some.Lib==1", "pytest==1"]},
        {"ref": "Some.Lib==1", "dependsOn": ["rich==1", "pytest==1"]},
        {"ref": "pytest==1", "dependsOn": ["rich==1"]},
        {"ref": "rich==1"},
    ],
}


def test_only_what_runs_is_in_the_sbom_and_no_path_of_this_machine() -> None:
    sbom = installed_to_run(SBOM, ["some_lib", "rich"])
    assert [each["name"] for each in sbom["components"]] == ["Some.Lib", "rich"]
    assert sbom["components"][0]["externalReferences"] == [PYPI]
    assert sbom["dependencies"] == [
        {"ref": "root-component", "dependsOn": ["Some.Lib==1"]},
        {"ref": "Some.Lib==1", "dependsOn": ["rich==1"]},
        {"ref": "rich==1", "dependsOn": []},
    ]
    text = json.dumps(sbom)
    assert "pytest" not in text
    assert "file:" not in text


def test_a_package_that_is_pinned_and_not_installed_ends_the_release() -> None:
    with pytest.raises(SystemExit, match="not installed, so not in the SBOM: missing-one"):
        installed_to_run(SBOM, ["rich", "Missing_One"])
