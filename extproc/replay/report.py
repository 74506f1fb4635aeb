"""A comparison on the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from extproc.replay.result import Run
from extproc.telemetry.columns import Column, fitting, wider


def table(trace: str, runs: Sequence[Run]) -> RenderableType:
    """One line a policy; the best value of each column stands out. Columns that do not fit are named below."""
    return _Comparison(trace, [run.summary() for run in runs])


def write_json(runs: Sequence[Run], path: Path) -> None:
    """``{"runs": [{...}]}``, one object a run."""
    path.write_text(json.dumps({"runs": [run.summary() for run in runs]}, indent=1) + "\n", "utf-8")


@dataclass(slots=True, frozen=True)
class _Comparison:
    trace: str
    rows: Sequence[dict[str, object]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table for this width."""
        shown, hidden = fitting(_columns(self.rows), options.max_width)
        yield Text(self.trace, "italic")
        yield shown
        if hidden:
            yield wider(hidden)
        yield ""


_COLUMNS: tuple[tuple[str, str, str, Any, int], ...] = (
    ("hit_ratio", "hits", ".1%", max, 1),
    ("ttft_p50_s", "TTFT\np50 s", ".3f", min, 4),
    ("ttft_p90_s", "TTFT\np90 s", ".3f", min, 7),
    ("ttft_p99_s", "TTFT\np99 s", ".3f", min, 2),
    ("e2e_p50_s", "E2E\np50 s", ".2f", min, 8),
    ("goodput", "good/s", ".2f", max, 5),
    ("slo_attained", "in SLO", ".1%", max, 3),
    ("max_over_mean_load", "load\nmax/mean", ".2f", min, 6),
    ("failed", "failed", "d", None, 9),
)
"""Key, head, format, what is best, rank."""


def _columns(rows: Sequence[dict[str, object]]) -> list[Column]:
    columns = [Column("policy", 0, [Text(str(row["policy"])) for row in rows], left=True)]
    for key, head, form, best, rank in _COLUMNS:
        failures = key == "failed" and any(row[key] for row in rows)
        cells = [_cell(row, rows, key, form, best) for row in rows]
        columns.append(Column(head, 1 if failures else rank, cells))
    return columns


def _cell(row: dict[str, object], peers: Sequence[dict[str, object]], key: str, form: str, best: Any) -> Text:
    value = row[key]
    if not isinstance(value, (int, float)):
        return Text("-")
    values = [other[key] for other in peers if isinstance(other[key], (int, float))]
    stands_out = best and len(values) > 1 and value == best(values)
    return Text(format(value, form), "bold green" if stands_out else "")
