"""The text of a growing answer, at a cost per token that does not depend on how long it has become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Decode = Callable[[list[int]], str]

#: Tokens that stay open. A token has at least one byte and a UTF-8 character at most four, so what comes later does
#: not change the text before them.
_OPEN = 4
#: By then even what may be half a character is settled: a model can say nothing but broken bytes for ever.
_TOO_MANY_OPEN = 64
_BROKEN = "\ufffd"


def decoder(tokenizer: Any, *, skip_special_tokens: bool) -> Decode:
    """transformers' `decode`, without its overhead where that does nothing."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", True):
        backend: Decode = fast.decode
        return lambda ids: backend(ids, skip_special_tokens)  # type: ignore[call-arg]
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


class GrowingText:
    """`update` is `decode` of all tokens, for token lists of which each continues the one before.

    Only the last few tokens are decoded: behind `_settled` tokens whose text is known, and with some of those in
    front, since a token's text may depend on its neighbours.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._restart()

    def update(self, token_ids: list[int]) -> str:
        """A list that was cut short (a stop word) is decoded as a whole."""
        if len(token_ids) < self._settled:
            self._restart()
        window = self._decode(token_ids[self._context :])
        text = self._text + window[self._known :]
        # In steps, so that one end is tried with several lengths: both have to be between two characters.
        end = (len(token_ids) // _OPEN - 1) * _OPEN
        if end > self._settled:
            self._settle(token_ids[:end], window, is_late=end > self._settled + _TOO_MANY_OPEN)
        return text

    def whole(self, token_ids: list[int]) -> str:
        """The finished answer, in one piece: right for any tokenizer, however its tokens depend on each other."""
        return self._decode(token_ids)

    def _restart(self) -> None:
        #: The text of the settled tokens; of it, `_known` characters come from those since `_context`.
        self._text = ""
        self._known = 0
        self._context = 0
        self._settled = 0

    def _settle(self, token_ids: list[int], window: str, *, is_late: bool) -> None:
        """Not when they end within a character. Some decoders take a whole run of bytes for broken till it ends."""
        text = self._decode(token_ids[self._context :])
        if is_late or (window.startswith(text) and not text.endswith(_BROKEN)):
            self._text += text[self._known :]
            self._context, self._settled = self._settled, len(token_ids)
            self._known = len(self._decode(token_ids[self._context :]))
