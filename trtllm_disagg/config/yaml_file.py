"""Reads YAML and JSON strictly: refuses content that their libraries silently resolve or fail on badly."""

from __future__ import annotations

import json
import os
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    import yaml

ENGINE_CONFIGS = "engine_configs"
#: Levels: far more than engine arguments need, but safe for recursion.
DEEPEST = 50
#: A hundred times the longest known file; ten times that would take the YAML library a minute.
MAX_BYTES = 1_000_000
#: An alias counts as all its values, which `<<` and readers may copy each time. A file without aliases has fewer.
MAX_VALUES = MAX_BYTES


def shipped(path: Path) -> Path:
    """`path`, or if it does not exist, the engine file shipped with this package under that name, as
    "engine_configs/demo" or "demo", in a checkout or beside an installed wheel.
    """
    # os.path returns False where Path raises, as for names that are too long.
    if os.path.exists(path):
        return path
    ours = (file for each in distributions(name="trtllm-disagg") for file in each.files or ())
    shared = (Path(str(file.locate())).parents[1] for file in ours if ENGINE_CONFIGS in file.parts)
    roots = dict.fromkeys((Path(__file__).parents[2] / ENGINE_CONFIGS, *shared))
    found = (root / path.as_posix().removeprefix(f"{ENGINE_CONFIGS}/") for root in roots)
    return next((each.resolve() for each in found if os.path.exists(each)), path)


def read_mapping(path: Path, key: str) -> dict[str, Any]:
    """The file's keys and values; none if empty. Raises ConfigError, naming the file or `key`."""
    path = shipped(path)
    if not os.path.exists(path):
        raise ConfigError.bad_value(key, str(path), "a YAML file that exists")
    try:
        content = _read_yaml(path)
    except OSError as error:
        raise ConfigError.bad_value(
            key, str(path), f"a YAML file that can be read ({error.strerror})"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys with values, got {type(content).__name__}")
    return content


def _read_yaml(path: Path) -> Any:
    """Raises OSError for an unreadable file, ValueError for wrong content."""
    import yaml

    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes long")
    text = content.decode()
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _require_plain(root, (), {})
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None
    except (AttributeError, LookupError, OverflowError):
        raise ValueError("a tag, such as !!timestamp or !!int, on a value that is none") from None
    except yaml.YAMLError as error:
        # Invalid dates and non-text bytes raise ValueError.
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"not YAML: {problem or ' '.join(str(error).split())}{where}") from error


def _require_plain(node: yaml.Node, above: tuple[int, ...], checked: dict[tuple[int, int], int]) -> int:
    """The number of values in the node. Raises ValueError for duplicate keys, of which YAML would use the last, for a
    node that contains itself, and for too many levels or values. `above`: the ids of the enclosing nodes (an alias is
    its anchor's object). `checked`: by id and level.
    """
    import yaml

    here = (id(node), len(above))
    if isinstance(node, yaml.ScalarNode):
        return 1
    if here in checked:
        return checked[here]
    what = f"what begins in line {node.start_mark.line + 1}"
    if id(node) in above:
        raise ValueError(f"{what} contains itself, by an alias")
    if len(above) == DEEPEST:
        raise ValueError(f"{what} is nested more than {DEEPEST} levels deep")
    parts = node.value
    if isinstance(node, yaml.MappingNode):
        _require_each_key_once(node)
        parts = [part for pair in node.value for part in pair]
    count = sum(_require_plain(part, (*above, id(node)), checked) for part in parts)
    if count > MAX_VALUES:
        raise ValueError(f"{what} has more than {MAX_VALUES} values, by aliases")
    checked[here] = 1 + count
    return checked[here]


def _require_each_key_once(mapping: yaml.MappingNode) -> None:
    import yaml

    seen: dict[tuple[str, str], yaml.Node] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        first = seen.setdefault((key.tag, key.value), key)
        if first is not key:
            raise ValueError(
                f"{key.value} is there twice, in lines {first.start_mark.line + 1} and {key.start_mark.line + 1}"
            )


def read_json(text: str) -> Any:
    """Raises ValueError for invalid JSON, duplicate keys, of which Python would use the last, and lone surrogates,
    which no other program reads; RecursionError for thousands of levels.
    """
    content = json.loads(text, object_pairs_hook=_each_key_once)
    json.dumps(content, ensure_ascii=False).encode()
    return content


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"{key} is there twice")
        mapping[key] = value
    return mapping
