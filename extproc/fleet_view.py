"""The terminal views: ``extproc fleet`` and ``extproc explain``, from a running extproc's admin address."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from extproc.telemetry.explain import explain


class AdminError(Exception):
    """The admin address did not give what was asked for; the text is for people."""


def fetch(admin_url: str, path: str, timeout_s: float = 5.0) -> Any:
    """JSON from the admin address. Raises :class:`AdminError`."""
    url = admin_url.rstrip("/") + path
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise AdminError(_told(error)) from error
    except (OSError, ValueError) as error:
        raise AdminError(f"no answer from {url}: {getattr(error, 'reason', error)}") from error


def run_fleet(
    admin_url: str,
    json_output: bool = False,
    interval: float = 1.0,
    once: bool = False,
    console: Console | None = None,
) -> None:
    """Show the endpoints until Ctrl-C; ``once`` or ``json_output``: print and return. Raises
    :class:`AdminError`.
    """
    screen = console or Console()
    report = fetch(admin_url, "/fleet")
    if json_output:
        screen.print_json(json.dumps(report))
    elif once:
        screen.print(fleet_table(report["endpoints"]))
    else:
        try:
            with Live(fleet_table(report["endpoints"]), console=screen, auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(_now(admin_url), refresh=True)
        except KeyboardInterrupt:
            return


def run_explain(
    admin_url: str, decision_id: str, json_output: bool = False, console: Console | None = None
) -> None:
    """Show why a request went where it went. Raises :class:`AdminError`."""
    screen = console or Console()
    record = fetch(admin_url, "/decisions/" + urllib.parse.quote(decision_id, safe=""))
    if json_output:
        screen.print_json(json.dumps(record))
    else:
        screen.print(explain(record))


def fleet_table(endpoints: Sequence[Mapping[str, Any]]) -> Table:
    """One row an endpoint; what is not known is a dash."""
    table = Table(caption=f"{len(endpoints)} endpoints, {sum(row['leases'] for row in endpoints)} requests")
    for name, justify in _COLUMNS:
        table.add_column(name, justify="right" if justify else "left", no_wrap=not justify)
    for row in endpoints:
        state, style = _state(row)
        table.add_row(
            Text(row["endpoint"]),
            Text(row["pool"] + (f" {row['version']}" if row["version"] else "")),
            Text(state, style=style),
            str(row["leases"]),
            f"{row['backlog_s']:.2f}" + ("~" if row["backlog_estimated"] and row["backlog_s"] else ""),
            _whole(row["running"]),
            _whole(row["waiting"]),
            _percent(row["kv_usage"]),
            _percent(row["hit_share"]),
            _seconds(row["ttft_1m_s"]),
            _seconds(row["ttft_5m_s"]),
            f"{row['prefill_tokens_per_s']:.0f}",
            _seconds(row["scrape_age_s"]),
        )
    return table


_COLUMNS = (
    ("endpoint", False),
    ("pool", False),
    ("state", False),
    ("leases", True),
    ("backlog s", True),
    ("running", True),
    ("waiting", True),
    ("KV", True),
    ("hits", True),
    ("TTFT 1m", True),
    ("TTFT 5m", True),
    ("tokens/s", True),
    ("scraped", True),
)


def _now(admin_url: str) -> Table | Text:
    try:
        return fleet_table(fetch(admin_url, "/fleet")["endpoints"])
    except AdminError as error:
        return Text(str(error), style="red")


def _state(row: Mapping[str, Any]) -> tuple[str, str]:
    if row["excluded"]:
        return f"excluded {row['excluded_for_s']:.0f}s", "red"
    if row["lifecycle"] != "ready":
        return row["lifecycle"], "yellow"
    if row["sleeping"]:
        return "sleeping", "yellow"
    if row["scrape_failures"]:
        return "no metrics", "yellow"
    return "ready", "green"


def _told(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url}: {error.code} {error.reason}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
