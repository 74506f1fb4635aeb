"""``extproc fleet queue``: who waits where, from a running extproc's admin address."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

from extproc.fleet_view import AdminError, fetch
from extproc.telemetry.columns import Column, counted, fitting, wider

_COLUMNS = (
    ("pool", 0),
    ("priority", 2),
    ("tenant", 0),
    ("waiting", 0),
    ("oldest s", 1),
    ("tokens/s", 4),
    ("note", 3),
)
"""Head and rank."""
_LEFT = ("pool", "priority", "tenant", "note")


def run_queue(
    admin_url: str,
    json_output: bool = False,
    interval: float = 1.0,
    once: bool = False,
    console: Console | None = None,
) -> None:
    """Show the queues until Ctrl-C; ``once`` or ``json_output``: print and return. Raises :class:`AdminError`."""
    screen = console or Console()
    report = fetch(admin_url, "/queue")
    if json_output:
        screen.print_json(json.dumps(report))
    elif once:
        screen.print(queue_table(report))
    else:
        try:
            with Live(queue_table(report), console=screen, auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(_now(admin_url), refresh=True)
        except KeyboardInterrupt:
            return


def queue_table(report: Mapping[str, Any]) -> RenderableType:
    """One row a tenant that waits; a pool without any has one row."""
    return _QueueTable(report)


@dataclass(slots=True, frozen=True)
class _QueueTable:
    report: Mapping[str, Any]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table and its sum for this width."""
        rows = [row for pool in self.report["pools"] for row in _rows(pool)]
        columns = [
            Column(head, rank, [Text(row[position]) for row in rows], left=head in _LEFT)
            for position, (head, rank) in enumerate(_COLUMNS)
            if head != "note" or any(row[position] for row in rows)
        ]
        table, hidden = fitting(columns, options.max_width)
        yield table
        waiting = self.report["waiting"]
        yield Text(f"{counted(waiting, 'request')} {'waits' if waiting == 1 else 'wait'}", "dim")
        if hidden:
            yield wider(hidden)


def _rows(pool: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The pool, then its tenants by priority: one text a column."""
    notes = ["circuit open"] if pool["circuit"] == "open" else []
    if pool["fallback"]:
        notes.append(f"falls back to {pool['fallback']}")
    yield pool["pool"], "", "", str(pool["requests"]), "", _rate(pool["tokens_per_s"]), ", ".join(notes)
    for band in pool["priorities"]:
        rate = _rate(band["tokens_per_s"])
        for tenant in band["tenants"]:
            note = "at its concurrency limit" if tenant["limited"] else ""
            waiting, oldest = str(tenant["requests"]), f"{tenant['oldest_s']:.1f}"
            yield "", str(band["priority"]), tenant["tenant"], waiting, oldest, rate, note
            rate = ""


def _now(admin_url: str) -> RenderableType:
    try:
        return queue_table(fetch(admin_url, "/queue"))
    except AdminError as error:
        return Text(str(error), style="red")


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
