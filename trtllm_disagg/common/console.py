"""The rich console of every command: colours on a terminal only, and none under NO_COLOR."""

from __future__ import annotations

from typing import IO

from rich.console import Console as RichConsole


class Console(RichConsole):
    """`paper`: columns without a terminal, where rich would cut tables to 80."""

    def __init__(
        self, file: IO[str] | None = None, *, paper: int | None = None, soft_wrap: bool = False
    ) -> None:
        super().__init__(file=file, highlight=False, soft_wrap=soft_wrap)
        if paper is not None and not self.is_terminal:
            self.width = paper

    def paragraph(self, text: str) -> None:
        """Print `text` unchanged: wrapped between words on a terminal, on one line elsewhere."""
        self.print(text, markup=False, emoji=False, soft_wrap=not self.is_terminal)

    def on_broken_pipe(self) -> None:
        # rich would end the program with exit code 1; `cli.main` exits with READER_LEFT.
        raise
