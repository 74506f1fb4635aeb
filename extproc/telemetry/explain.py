"""A decision record as a table for people, from its JSON form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def explain(record: Mapping[str, Any]) -> RenderableType:
    """The record in three parts: what was asked, who could have answered at what cost, what became of it."""
    parts: list[RenderableType] = [_asked(record)]
    if record["candidates"]:
        parts.append(_candidates(record))
    if record["removed"]:
        parts.append(_removed(record))
    parts.append(_ended(record))
    return Group(*parts)


def _asked(record: Mapping[str, Any]) -> Table:
    table = _facts()
    when = datetime.fromtimestamp(record["at"], UTC).isoformat(timespec="milliseconds")
    _fact(table, "request", record["id"])
    _fact(table, "at", f"{when}, decided in {record['took_us']:.0f} us")
    _fact(
        table,
        "asked for",
        f"{record['api']}, model {record['model'] or '-'}" + (", streamed" if record["stream"] else ""),
    )
    _fact(table, "by", record["tenant"] or "-")
    prompt = f"{record['prompt_tokens']} tokens in {record['prompt_bytes']} bytes"
    _fact(table, "prompt", prompt + (f", {record['media']} media" if record["media"] else ""))
    version = f", version {record['version']}" if record["version"] else ""
    _fact(
        table,
        "route",
        f"{record['route'] or '-'} -> pool {record['pool'] or '-'}{version}, {record['strategy'] or '-'}",
    )
    return table


def _candidates(record: Mapping[str, Any]) -> Table:
    names: Sequence[str] = record["terms"]
    table = Table(title="candidates, best first", title_justify="left")
    table.add_column("endpoint", no_wrap=True)
    table.add_column("cost", justify="right")
    for name in names:
        table.add_column(Text(name), justify="right")
    table.add_column("holds tokens", justify="right")
    table.add_column("leases", justify="right")
    table.add_column("")
    fallbacks = record["fallbacks"]
    for row in record["candidates"]:
        endpoint = row["endpoint"]
        role = "chosen" if endpoint == record["chosen"] else ""
        if endpoint in fallbacks:
            role = f"fallback {fallbacks.index(endpoint) + 1}"
        cells = [_number(row["cost"]), *(_number(value) for value in row["terms"])]
        cells += [""] * (1 + len(names) - len(cells))
        table.add_row(
            Text(endpoint),
            *cells[: 1 + len(names)],
            str(row["matched_tokens"]),
            str(row["leases"]),
            role,
            style="bold" if role == "chosen" else "",
        )
    _more(table, record["candidates_total"] - len(record["candidates"]))
    return table


def _removed(record: Mapping[str, Any]) -> Table:
    table = Table(title="could not take it", title_justify="left")
    table.add_column("endpoint", no_wrap=True)
    table.add_column("because")
    for row in record["removed"]:
        table.add_row(Text(row["endpoint"]), Text(row["reason"]))
    _more(table, record["removed_total"] - len(record["removed"]))
    return table


def _ended(record: Mapping[str, Any]) -> Table:
    table = _facts()
    refused, outcome = record["rejection"], record["outcome"]
    if refused is not None:
        _fact(table, "refused", f"{refused['status']} {refused['code']} ({refused['reason']})")
        _fact(table, "told", refused["message"])
        if refused["retry_after_s"] is not None:
            _fact(table, "retry after", f"{refused['retry_after_s']:g} s")
    elif outcome is None:
        _fact(table, "outcome", "still running")
    else:
        status = "" if outcome["status"] is None else f"{outcome['status']} "
        _fact(
            table, "outcome", f"{status}{outcome['outcome']} ({outcome['reason']}) from {outcome['endpoint']}"
        )
        _fact(table, "attempts", str(outcome["attempts"]))
        times = ("waiting_s", "ttft_s", "engine_s", "duration_s")
        _fact(table, "times", ", ".join(f"{name[:-2]} {_number(outcome[name])} s" for name in times))
        counts = ("input_tokens", "cached_tokens", "output_tokens")
        said = ", ".join(f"{name[:-7]} {outcome[name]}" for name in counts if outcome[name] is not None)
        _fact(table, "tokens", said or "not reported")
        if outcome["flags"] or outcome["details"]:
            _fact(table, "Envoy", " ".join([*outcome["flags"], outcome["details"]]))
    return table


def _facts() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    return table


def _fact(table: Table, name: str, value: str) -> None:
    table.add_row(name, Text(value))


def _more(table: Table, count: int) -> None:
    if count > 0:
        table.caption = f"and {count} more"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
