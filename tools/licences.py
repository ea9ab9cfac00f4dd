"""Writes docs/reference/licences.md: the packages that `make` installs to run, by requirements/, and their licences.

python -m tools.licences
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tools.reference import table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "licences.md"
#: Without requirements of tests, docs and releases, which are in no deployment.
FILES = ("torch.txt", "base.txt", "dynamo.txt")
_PIN = re.compile(r"^([\w.-]+)(?:\[[^\]]*\])?==([\w.+!-]+)", re.MULTILINE)
_CLASSIFIER = "License :: "


def pins() -> list[tuple[str, str]]:
    text = "".join((ROOT / "requirements" / name).read_text(encoding="utf-8") + "\n" for name in FILES)
    return sorted(_PIN.findall(text), key=lambda pin: pin[0].lower())


def licence_of(name: str) -> str:
    """The licence that the package names: an SPDX expression, a classifier, or the first line of its text."""
    told = metadata.metadata(name)
    classifiers = [
        line.rpartition(" :: ")[2] for line in told.get_all("Classifier", []) if line.startswith(_CLASSIFIER)
    ]
    free_text = "".join(told.get_all("License", [])).strip().partition("\n")[0]
    return "".join(told.get_all("License-Expression", [])) or ", ".join(classifiers) or free_text


def page() -> str:
    text = "# Licences of dependencies\n\n<!-- Made by tools/licences.py from what is installed; change that. -->\n\n"
    text += "What `make` installs to run, by exact version, and the licence that each package names. "
    text += "This project: Apache-2.0.\nTensorRT-LLM and what it brings are not in it. "
    text += "`make release` writes an SBOM of the same packages.\n\n"
    return text + table(("package", "version", "licence"), _rows())


def _rows() -> Iterator[tuple[str, str, str]]:
    for name, version in pins():
        yield name, version, licence_of(name)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
