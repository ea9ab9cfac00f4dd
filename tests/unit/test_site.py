"""The site: built without a warning, and complete without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What a browser loads by itself, as opposed to a link that the reader follows.
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'> ]+"
    r"|<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^\"'> ]+"
    r"|(?:url\(|@import )[\"']?(?:https?:)?//[^\"') ]+"
)
_CDN = re.compile(r"https?://[^\s\"'`]*(?:unpkg|jsdelivr|cdnjs|googleapis|gstatic)[^\s\"'`]*")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def texts(site: Path) -> dict[Path, str]:
    kinds = (".html", ".css", ".js", ".svg")
    return {path: path.read_text(encoding="utf-8") for path in site.rglob("*") if path.suffix in kinds}


def test_a_page_loads_nothing_from_the_network(site: Path) -> None:
    loaded = {path: found for path, text in texts(site).items() if (found := _LOADED.findall(text))}
    named = {path: found for path, text in texts(site).items() if (found := _CDN.findall(text))}
    assert not loaded
    assert not named


def test_every_diagram_is_drawn(site: Path) -> None:
    fences = sum(page.read_text().count("```mermaid") for page in (ROOT / "docs").rglob("*.md"))
    pages = "".join(text for path, text in texts(site).items() if path.suffix == ".html")
    drawn = re.findall(r'src="(?:\.\./)*(diagrams/\w+\.svg)"', pages)
    assert len(drawn) == fences > 0
    assert all((site / name).read_text().startswith("<svg") for name in drawn)
    assert 'class="mermaid"' not in pages


def test_every_page_can_be_reached(site: Path) -> None:
    home = (site / "index.html").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if f'href="{page.with_suffix(".html")}"' not in home]
