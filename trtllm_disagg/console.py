"""The one kind of rich console that every command writes to: colours on a terminal only, and none under NO_COLOR."""

from __future__ import annotations

from typing import IO

from rich.console import Console as RichConsole


class Console(RichConsole):
    """`paper`: columns where there is no terminal; rich would cut a table in a file to 80."""

    def __init__(
        self, file: IO[str] | None = None, *, paper: int | None = None, soft_wrap: bool = False
    ) -> None:
        super().__init__(file=file, highlight=False, soft_wrap=soft_wrap)
        if paper is not None and not self.is_terminal:
            self.width = paper

    def on_broken_pipe(self) -> None:
        # rich would end the program with exit code 1; `cli.main` knows better.
        raise
