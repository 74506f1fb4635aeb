"""The terminal views: ``extproc fleet`` and ``extproc explain``, from a running extproc's admin address."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

from extproc.telemetry.columns import Column, counted, fitting, wider
from extproc.telemetry.explain import explain
from extproc.telemetry.short_names import short_names

_UNBOUNDED = 1000


class AdminError(Exception):
    """The admin address did not give what was asked for; the text is for people."""


def admin_base(address: str) -> str:
    """The URL that people mean by ``HOST:PORT`` or ``http://HOST:PORT/``. Raises :class:`AdminError`."""
    url = (address if "://" in address else f"http://{address}").rstrip("/")
    try:
        parts = urllib.parse.urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        wrong = True
    if wrong:
        raise AdminError(f"admin address {address}: write HOST:PORT or http://HOST:PORT")
    return url


def fetch(admin_url: str, path: str, timeout_s: float = 5.0) -> Any:
    """JSON from the admin address. Raises :class:`AdminError`."""
    return _answer(urllib.request.Request(admin_base(admin_url) + path), timeout_s)


def send(
    admin_url: str, path: str, body: Mapping[str, Any], token: str | None = None, timeout_s: float = 30.0
) -> Any:
    """Have the admin address do something; its JSON answer. Raises :class:`AdminError`."""
    request = urllib.request.Request(
        admin_base(admin_url) + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    if token:
        request.add_header("authorization", f"Bearer {token}")
    return _answer(request, timeout_s)


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
    screen = console or _screen()
    report = fetch(admin_url, "/fleet")
    if json_output:
        _print_json(report, screen)
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
    screen = console or _screen()
    record = fetch(admin_url, "/decisions/" + urllib.parse.quote(decision_id, safe=""))
    if json_output:
        _print_json(record, screen)
    else:
        screen.print(explain(record))


def fleet_table(endpoints: Sequence[Mapping[str, Any]], most_rows: int | None = None) -> RenderableType:
    """One row an endpoint, with as many columns as the width of the screen allows; what is not known is a dash.
    ``most_rows``: for a screen that is low; the sums are still of all.
    """
    return _FleetTable(endpoints, most_rows)


@dataclass(slots=True, frozen=True)
class _FleetTable:
    endpoints: Sequence[Mapping[str, Any]]
    most_rows: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table and its sums for this width."""
        rows = self.endpoints
        columns = _columns(rows) if rows else []
        table, hidden = fitting(columns, options.max_width, self.most_rows)
        yield table
        running, ended = sum(row["leases"] for row in rows), sum(row["ended_1m"] for row in rows)
        not_shown = 0 if self.most_rows is None else max(len(rows) - self.most_rows, 0)
        yield Text(
            (f"and {not_shown} more; " if not_shown else "")
            + f"{counted(len(rows), 'endpoint')}, {counted(running, 'request')} open, {ended} ended in the last minute",
            "dim",
        )
        if hidden:
            yield wider(hidden)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """All columns, in the order in which they are shown."""
    names = short_names(row["endpoint"] for row in rows)
    ended = sum(row["ended_1m"] for row in rows)
    pools = [row["pool"] + (f" {row['version']}" if row["version"] else "") for row in rows]

    def column(head: str, rank: int, cell: Callable[[Mapping[str, Any]], str]) -> Column:
        return Column(head, rank, [Text(cell(row)) for row in rows], left=head == "endpoint")

    return [
        column("endpoint", 0, lambda row: names[row["endpoint"]]),
        Column("pool", 1 if len(set(pools)) > 1 else 13, [Text(pool) for pool in pools], left=True),
        Column("state", 0, [Text(*_state(row)) for row in rows], left=True),
        column("open", 0, lambda row: str(row["leases"])),
        column("ended 1m", 2, lambda row: str(row["ended_1m"])),
        column("share", 3, lambda row: f"{row['ended_1m'] / ended:.0%}" if ended else "-"),
        column("backlog s", 4, _backlog),
        column("hits", 5, lambda row: _percent(row["hit_share"])),
        column("KV", 6, lambda row: _percent(row["kv_usage"])),
        column("TTFT 1m", 7, lambda row: _seconds(row["ttft_1m_s"])),
        column("TTFT 5m", 12, lambda row: _seconds(row["ttft_5m_s"])),
        column("waiting", 8, lambda row: _whole(row["waiting"])),
        column("running", 9, lambda row: _whole(row["running"])),
        column("prefill/s", 10, lambda row: f"{row['prefill_tokens_per_s']:.0f}"),
        column("scraped", 11, lambda row: _seconds(row["scrape_age_s"])),
    ]


def _screen() -> Console:
    """The terminal; a pipe or a file has no width and gets everything."""
    return Console() if sys.stdout.isatty() else Console(width=_UNBOUNDED)


def _print_json(value: object, screen: Console) -> None:
    # Not through rich: it would break long lines.
    print(json.dumps(value, indent=2), file=screen.file)


def _now(admin_url: str) -> RenderableType:
    try:
        return fleet_table(fetch(admin_url, "/fleet")["endpoints"])
    except AdminError as error:
        return Text(str(error), style="red")


def _state(row: Mapping[str, Any]) -> tuple[str, str]:
    if row["excluded"]:
        return f"open {row['excluded_for_s']:.0f}s: {row['circuit_why']}", "red"
    if row["lifecycle"] != "ready":
        return row["lifecycle"], "yellow"
    if row["sleeping"]:
        return "sleeping", "yellow"
    if row["circuit"] == "half_open":
        return "on trial", "yellow"
    if row["busy_for_s"]:
        return f"busy {row['busy_for_s']:.1f}s", "yellow"
    if row["scrape_failures"]:
        return "no metrics", "yellow"
    return "ready", "green"


def _backlog(row: Mapping[str, Any]) -> str:
    return f"{row['backlog_s']:.2f}" + ("~" if row["backlog_estimated"] and row["backlog_s"] else "")


def _answer(request: urllib.request.Request, timeout_s: float) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise AdminError(_told(error)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        told = getattr(reason, "strerror", None) or reason
        raise AdminError(f"no answer from {request.full_url}: {told}") from error


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
