"""Reads YAML files strictly: refuses content that the YAML library would silently resolve, or fail on badly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

#: Levels: far more than engine arguments have, and few enough for recursive functions.
DEEPEST = 50
#: A hundred times the longest known file; the YAML library needs a minute for ten times that.
MOST_BYTES = 1_000_000


def read_yaml(path: Path) -> Any:
    """Raises OSError when the file cannot be read, and ValueError for wrong content."""
    import yaml

    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes long")
    text = content.decode()
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _require_plain(root)
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None
    except AttributeError:
        raise ValueError("a !!timestamp that is none") from None
    except yaml.YAMLError as error:
        # Invalid dates and bytes that are no text raise ValueError themselves.
        raise ValueError(str(error)) from error


def _require_plain(root: yaml.Node) -> None:
    """Raises ValueError for duplicate keys, of which YAML would use the last; for a node that contains itself; and for
    too many levels.
    """
    _Walk().down(root, 1)


class _Walk:
    def __init__(self) -> None:
        # Keyed by id: an alias is the same object as its anchor.
        self._depth_below: dict[int, int] = {}
        self._above: set[int] = set()

    def down(self, node: yaml.Node, depth: int) -> int:
        """The number of levels of `node`, itself included."""
        import yaml

        if isinstance(node, yaml.ScalarNode):
            return 1
        here = id(node)
        if here in self._above:
            raise ValueError(f"{_line(node)} contains itself, by an alias")
        if here not in self._depth_below:
            if depth > DEEPEST:
                raise ValueError(f"{_line(node)} is nested more than {DEEPEST} levels deep")
            self._above.add(here)
            if isinstance(node, yaml.MappingNode):
                _require_each_key_once(node)
                parts = [part for pair in node.value for part in pair]
            else:
                parts = node.value
            self._depth_below[here] = 1 + max((self.down(part, depth + 1) for part in parts), default=0)
            self._above.discard(here)
        levels = self._depth_below[here]
        if depth + levels - 1 > DEEPEST:
            raise ValueError(f"{_line(node)} is nested more than {DEEPEST} levels deep")
        return levels


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


def _line(node: yaml.Node) -> str:
    return f"what begins in line {node.start_mark.line + 1}"
