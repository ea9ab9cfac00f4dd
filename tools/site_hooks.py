"""Hooks for mkdocs: pages from outside docs/, and diagrams that need no script in a browser."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mmdr
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: Pages at the top of the repository, where readers look for them.
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: A script that the theme would load to draw diagrams. None is left to draw.
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
    """The pages of a folder: index.md, the pages that it links, in its order, then the others."""
    path = ROOT / "docs" / folder
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (path / "index.md").read_text(encoding="utf-8"))
    there = sorted(page.name for page in path.glob("*.md"))
    return [_with_parts(folder, path / name) for name in dict.fromkeys(["index.md", *linked, *there])]


def _with_parts(folder: str, page: Path) -> Any:
    """The page, with the pages of the folder that has its name, if there is one."""
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
    return _MERMAID.sub(_drawn(source, config, files), markdown)


def _drawn(source: str, config: Any, files: Files) -> Callable[[re.Match[str]], str]:
    up = "../" * source.count("/")

    def draw(fence: re.Match[str]) -> str:
        svg = mmdr.render(fence[1]).svg()
        name = f"diagrams/{hashlib.sha256(svg.encode()).hexdigest()[:16]}.svg"
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, content=svg))
        kind = "sequence of messages" if fence[1].startswith("sequence") else "diagram"
        return f"![{kind}]({up}{name})"

    return draw


def on_post_build(config: Any) -> None:
    for script in Path(config["site_dir"]).rglob("*.js*"):
        text = script.read_text(encoding="utf-8")
        if _LOADED_LATER.search(text):
            script.write_text(_LOADED_LATER.sub("", text), encoding="utf-8")
