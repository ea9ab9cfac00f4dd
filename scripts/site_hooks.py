"""Hooks for mkdocs: adds pages from outside docs/, and draws diagrams without scripts."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import mmdr
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: Pages that readers expect at the top of the repository.
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: The theme's script for diagrams, which are drawn already.
_LOADED_LATER = re.compile(r"https://unpkg\.com/[^\"'`]*")


def on_config(config: Any) -> Any:
    config["nav"] = _with_pages(config["nav"])
    return config


def _with_pages(nav: Any) -> Any:
    """Replaces each `folder/` by its pages."""
    if isinstance(nav, list):
        return [_with_pages(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: _with_pages(entry) for title, entry in nav.items()}
    return section(nav) if nav.endswith("/") else nav


def section(folder: str) -> list[Any]:
    """The pages of a folder: index.md, the pages that it links, then the others."""
    path = ROOT / "docs" / folder
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (path / "index.md").read_text(encoding="utf-8"))
    there = sorted(page.name for page in path.glob("*.md"))
    return [_with_parts(folder, path / name) for name in dict.fromkeys(["index.md", *linked, *there])]


def _with_parts(folder: str, page: Path) -> Any:
    """The page, and the pages of the folder with its name."""
    parts = [f"{folder}{page.stem}/{part.name}" for part in sorted(page.with_suffix("").glob("*.md"))]
    if not parts:
        return folder + page.name
    (title,) = re.findall(r"^# (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {title: [folder + page.name, *parts]}


def on_files(files: Files, config: Any) -> Files:
    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = page.file.src_uri
    if source in OUTSIDE:
        markdown = re.sub(r"\]\(docs/", "](", markdown)
    else:
        markdown = re.sub(rf"\]\(((?:\.\./)*)\.\./({'|'.join(OUTSIDE)})", r"](\1\2", markdown)
    return _MERMAID.sub(_drawn, markdown)


def _drawn(fence: re.Match[str]) -> str:
    """The diagram as inline SVG, which site.css colours for light and dark."""
    svg = mmdr.render(fence[1]).svg()
    # Each diagram needs its own ids and styles.
    svg = svg.replace("merman", f"d{hashlib.sha256(svg.encode()).hexdigest()[:8]}")
    # On a narrow screen, a diagram shrinks to 80 % and then scrolls.
    svg = re.sub(
        r"max-width:([\d.]+)px",
        lambda width: f"{width[0]};min-width:{0.8 * float(width[1]):.0f}px",
        svg,
        count=1,
    )
    return f'<div class="diagram" role="img" aria-label="diagram">{svg}</div>'


def on_post_build(config: Any) -> None:
    for script in Path(config["site_dir"]).rglob("*.js*"):
        text = script.read_text(encoding="utf-8")
        if _LOADED_LATER.search(text):
            script.write_text(_LOADED_LATER.sub("", text), encoding="utf-8")
