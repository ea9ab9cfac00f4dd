"""Which known block starts with the longest part of these tokens? A radix tree below every block's parent.

A lookup, an addition and a removal cost one walk over the tokens of a block, however many blocks are known.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

Tokens = tuple[int, ...]


class Found(NamedTuple):
    block: int
    #: Tokens from the block's start that are the same.
    num_tokens: int


@dataclass(slots=True)
class _Node:
    """What comes after a common start, by the next token. A leaf, where a block's tokens end, names the block."""

    edges: dict[int, tuple[Tokens, _Node]] = field(default_factory=dict)
    block: int = -1


class PartialIndex:
    """All blocks have the same number of tokens; two with the same parent differ somewhere."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _Node] = {}
        self._place_of: dict[int, tuple[bytes, Tokens]] = {}

    def add(self, parent: bytes, tokens: Seq[int], block: int) -> None:
        rest = tuple(tokens)
        self._place_of[block] = (parent, rest)
        node = self._roots.setdefault(parent, _Node())
        while rest[0] in node.edges:
            label, child = node.edges[rest[0]]
            shared = _shared(label, rest)
            if shared < len(label):
                fork = _Node({label[shared]: (label[shared:], child)})
                node.edges[rest[0]] = (label[:shared], fork)
                child = fork
            node, rest = child, rest[shared:]
        node.edges[rest[0]] = (rest, _Node(block=block))

    def remove(self, block: int) -> None:
        parent, rest = self._place_of.pop(block)
        node = root = self._roots[parent]
        above: tuple[_Node, Tokens] | None = None
        while True:
            label, child = node.edges[rest[0]]
            if len(label) == len(rest):
                break
            above, node, rest = (node, label), child, rest[len(label) :]
        del node.edges[rest[0]]
        if not root.edges:
            del self._roots[parent]
        elif above is not None and len(node.edges) == 1:
            # A fork with one way on is no fork.
            (onwards, only), (grandparent, label) = next(iter(node.edges.values())), above
            grandparent.edges[label[0]] = (label + onwards, only)

    def longest(self, parent: bytes, tokens: Seq[int]) -> Found | None:
        """A block below `parent` that shares the most tokens from its start on; None when none shares any."""
        node, depth = self._roots.get(parent), 0
        while node is not None and depth < len(tokens):
            label, child = node.edges.get(tokens[depth], ((), None))
            shared = _shared(label, tokens[depth : depth + len(label)])
            depth += shared
            if child is None or shared < len(label):
                node = child or node
                break
            node = child
        if node is None or not depth:
            return None
        while node.edges:
            _, node = next(iter(node.edges.values()))
        return Found(node.block, depth)

    def has_children(self, key: bytes) -> bool:
        return key in self._roots

    def holds(self, blocks: set[int]) -> bool:
        """These, and no others?"""
        return set(self._place_of) == blocks


class NoPartialIndex:
    """Only whole blocks are reused."""

    def add(self, parent: bytes, tokens: Seq[int], block: int) -> None:
        """Nothing is looked for later."""

    def remove(self, block: int) -> None:
        """Nothing was added."""

    def longest(self, parent: bytes, tokens: Seq[int]) -> Found | None:
        return None

    def has_children(self, key: bytes) -> bool:
        return False

    def holds(self, blocks: set[int]) -> bool:
        return True


def _shared(a: Seq[int], b: Seq[int]) -> int:
    """How many tokens both start with."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
