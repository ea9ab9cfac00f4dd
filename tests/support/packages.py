"""Installs packages as metadata only."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, *names: str) -> None:
    """For processes with `folder` in sys.path."""
    for name in names:
        metadata = folder / f"{name}-1.3.0rc29.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.3.0rc29\n")
