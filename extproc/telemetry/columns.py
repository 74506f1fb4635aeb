"""Tables for terminals of any width: what does not fit makes way, the least important first, and is named below.

A cell is never cut: half a number is worse than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

GAP = 2
"""Blanks between columns: one of padding, one where the box would have its line."""


@dataclass(slots=True, frozen=True)
class Column:
    """One column with all its cells."""

    head: str
    """May have several lines."""
    rank: int
    """Columns with high ranks go first when the screen is narrow; 0 always stays."""
    cells: Sequence[Text]
    left: bool = False

    @property
    def width(self) -> int:
        """Of its widest cell, and the gap."""
        return max(*map(len, self.head.splitlines()), *(cell.cell_len for cell in self.cells), 0) + GAP


def fitting(columns: Sequence[Column], width: int, most_rows: int | None = None) -> tuple[Table, list[str]]:
    """The table of the columns that fit, and the heads of those that do not."""
    room, shown = width + GAP, []
    for column in sorted(columns, key=lambda column: column.rank):
        room -= column.width
        if room < 0 and column.rank:
            break
        shown.append(column)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    kept = [column for column in columns if column in shown]
    for column in kept:
        table.add_column(column.head, justify="left" if column.left else "right", no_wrap=True)
    for cells in list(zip(*(column.cells for column in kept), strict=True))[:most_rows]:
        table.add_row(*cells)
    return table, [" ".join(column.head.split()) for column in columns if column not in shown]


def wider(hidden: Sequence[str]) -> Text:
    """The line that names them."""
    return Text("on a wider screen also: " + ", ".join(hidden), "dim")


def counted(number: int, noun: str) -> str:
    """``1 endpoint``, ``2 endpoints``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
