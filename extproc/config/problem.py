"""One thing wrong in a file, said so that a person can mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True, order=True)
class Problem:
    """``message`` says what is wrong and what to write instead. Lines count from 1; 0 means the whole file."""

    file: str
    line: int
    message: str
    fatal: bool = True
    """False: a warning, the configuration is usable."""

    def __str__(self) -> str:
        word = "" if self.fatal else "warning: "
        return f"{self.file}:{self.line}: {word}{self.message}"


class ConfigError(Exception):
    """The configuration cannot be used; ``problems`` says why."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join(map(str, self.problems)))
