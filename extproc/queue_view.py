"""``extproc fleet queue``: who waits where, from a running extproc's admin address."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from extproc.fleet_view import AdminError, fetch

_COLUMNS = ("pool", "priority", "tenant", "waiting", "oldest s", "tokens/s", "")


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


def queue_table(report: Mapping[str, Any]) -> Table:
    """One row a tenant that waits; a pool without any has one row."""
    table = Table(caption=f"{report['waiting']} requests wait")
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in _COLUMNS[3:6] else "left", no_wrap=True)
    for pool in report["pools"]:
        words = ["circuit open"] if pool["circuit"] == "open" else []
        if pool["fallback"]:
            words.append(f"falls back to {pool['fallback']}")
        table.add_row(
            Text(pool["pool"]),
            "",
            "",
            str(pool["requests"]),
            "",
            _rate(pool["tokens_per_s"]),
            Text(", ".join(words)),
        )
        for band in pool["priorities"]:
            rate = _rate(band["tokens_per_s"])
            for tenant in band["tenants"]:
                table.add_row(
                    "",
                    str(band["priority"]),
                    Text(tenant["tenant"]),
                    str(tenant["requests"]),
                    f"{tenant['oldest_s']:.1f}",
                    rate,
                    "at its concurrency limit" if tenant["limited"] else "",
                )
                rate = ""
    return table


def _now(admin_url: str) -> Table | Text:
    try:
        return queue_table(fetch(admin_url, "/queue"))
    except AdminError as error:
        return Text(str(error), style="red")


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
