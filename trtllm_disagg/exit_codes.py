"""The exit codes of every command (docs/reference/exit-codes.md)."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """`meaning` is the text for the table in the documentation."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    DONE = 0, "done; for `doctor`: no rule is broken"
    FAILED = (
        1,
        "it was begun and failed, or `doctor` found an error, or two orders of `demo` answered differently",
    )
    WRONG_SETTING = 2, "a flag, a variable, a file or a package is missing or wrong; nothing was begun"
    HANGUP = 129, "stopped by SIGHUP before it was done; for `up`: before it was ready"
    INTERRUPTED = 130, "stopped by Ctrl-C (SIGINT) before it was done; for `up`: before it was ready"
    READER_LEFT = 141, "what reads its output has closed the pipe, as `head` does"
    TERMINATED = 143, "stopped by SIGTERM before it was done; for `up`: before it was ready"
