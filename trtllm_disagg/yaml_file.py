"""YAML that somebody else has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_yaml(path: Path) -> Any:
    """Raises OSError when it cannot be read, and ValueError for whatever is wrong with what it says."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, RecursionError) as error:
        # A date that is none is a ValueError already, and so are bytes that are no text.
        raise ValueError(str(error)) from error
