"""Tokens without a model: each is computed from a checksum of all tokens before it, alike in every process.

So a prompt that ends with the start of an answer is continued with the rest of that answer, and two engines that split
a request give the same text as one that runs it whole.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

#: Printable ASCII in a vocabulary of bytes: every token is text at once.
FIRST_TOKEN, NUM_TOKENS = 16, 64

_BYTES = [token.to_bytes(4, "little") for token in range(FIRST_TOKEN + NUM_TOKENS)]


def checksum(tokens: Sequence[int], index: int = 0) -> int:
    """Checksum of a prompt, for the choice `index`."""
    return zlib.crc32(array("I", tokens), index * 101)


def token_after(checksum: int) -> int:
    return FIRST_TOKEN + checksum % NUM_TOKENS


def extended(checksum: int, token: int) -> int:
    """The checksum after one more token, which must come from `token_after`."""
    return zlib.crc32(_BYTES[token], checksum)
