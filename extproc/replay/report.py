"""A comparison on the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from extproc.replay.result import Run


def table(trace: str, runs: Sequence[Run]) -> Table:
    """One line a policy; the best value of each column stands out."""
    shown = Table(title=trace, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("policy", no_wrap=True)
    for _, title, _, _ in _COLUMNS:
        shown.add_column(title, justify="right", min_width=6)
    rows = [run.summary() for run in runs]
    for row in rows:
        shown.add_row(
            str(row["policy"]), *(_cell(row, rows, key, form, best) for key, _, form, best in _COLUMNS)
        )
    return shown


def write_json(runs: Sequence[Run], path: Path) -> None:
    """``{"runs": [{...}]}``, one object a run."""
    path.write_text(json.dumps({"runs": [run.summary() for run in runs]}, indent=1) + "\n", "utf-8")


_COLUMNS: tuple[tuple[str, str, str, Any], ...] = (
    ("hit_ratio", "hits", ".1%", max),
    ("ttft_p50_s", "TTFT\np50 s", ".3f", min),
    ("ttft_p90_s", "\np90 s", ".3f", min),
    ("ttft_p99_s", "\np99 s", ".3f", min),
    ("e2e_p50_s", "E2E\np50 s", ".2f", min),
    ("goodput", "good/s", ".2f", max),
    ("slo_attained", "in SLO", ".1%", max),
    ("max_over_mean_load", "load\nmax/mean", ".2f", min),
    ("failed", "failed", "d", None),
)


def _cell(row: dict[str, object], peers: list[dict[str, object]], key: str, form: str, best: Any) -> str:
    value = row[key]
    if not isinstance(value, (int, float)):
        return "-"
    text = format(value, form)
    values = [other[key] for other in peers if isinstance(other[key], (int, float))]
    return f"[bold green]{text}[/]" if best and len(values) > 1 and value == best(values) else text
