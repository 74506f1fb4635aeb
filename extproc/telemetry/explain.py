"""A decision record as people read it, from its JSON form: what was asked, why it went where it went, what became
of it.

Candidates are columns, best first, as many as the width allows; cost terms are rows, so that their names stay
readable on a narrow terminal. Zero is a dot, what is not known a dash; rows that are zero for every candidate
are named in one line, so that all fits on 24 lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from extproc.telemetry.short_names import short_names

MOST_COLUMNS = 12
"""Candidates shown at most, however wide the screen; ``--json`` has more."""
_GAP = 2
_HELD = "tokens held"
_ZERO = "·"
_PLAIN = "via_upstream"
"""Envoy's response details when the engine answered and nothing else is to be said."""


def explain(record: Mapping[str, Any]) -> RenderableType:
    """The record, laid out for the width of whatever console prints it."""
    return _Explained(record)


def why(record: Mapping[str, Any]) -> str:
    """In one sentence why the chosen endpoint was chosen; empty where none was."""
    rows, chosen = record["candidates"], record["chosen"]
    if not chosen or not rows:
        return ""
    names = _names(record)
    name, best = names[chosen], rows[0]
    if record["candidates_total"] == 1:
        return f"{name} was the only one that could take it"
    if not _in_seconds(record):
        return f"{name} came first by {record['strategy']}"
    holder = _holder(rows)
    held, most = best["matched_tokens"], holder["matched_tokens"]
    cost = f"{_seconds(best['cost'])} s"
    if not most:
        return f"nobody holds any of the prompt; {name} costs least, {cost}"
    if held == most:
        others = any(row["matched_tokens"] == most for row in rows[1:])
        rank = "no other more" if others else "no other as much"
        return f"{name} holds {held} of {record['prompt_tokens']} prompt tokens, {rank}, {cost}"
    return (
        f"{names[holder['endpoint']]} holds {most} tokens and {name} {held}, "
        f"but the first costs more ({_seconds(holder['cost'])} s) than the second ({cost})"
    )


@dataclass(slots=True, frozen=True)
class _Explained:
    record: Mapping[str, Any]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The parts for this width."""
        record = self.record
        yield _asked(record)
        if record["candidates"]:
            yield ""
            yield from _candidates(record, options.max_width)
        if record["removed"]:
            yield ""
            yield from _removed(record)
        yield ""
        yield _ended(record)


def _asked(record: Mapping[str, Any]) -> Table:
    table = _facts()
    when = datetime.fromtimestamp(record["at"], UTC).isoformat(sep=" ", timespec="milliseconds")
    _fact(table, "request", record["id"])
    _fact(table, "at", f"{when}, decided in {record['took_us']:.0f} us")
    asked = f"{record['api']}, model {record['model'] or '-'}" + (", streamed" if record["stream"] else "")
    _fact(table, "asked for", f"{asked}, by {record['tenant'] or '-'}")
    prompt = f"{record['prompt_tokens']} tokens in {record['prompt_bytes']} bytes"
    _fact(table, "prompt", prompt + (f", {record['media']} media" if record["media"] else ""))
    version = f", version {record['version']}" if record["version"] else ""
    place = f"{record['route'] or '-'} -> pool {record['pool'] or '-'}{version}"
    _fact(table, "route", f"{place}, {record['strategy'] or '-'}")
    if record["chosen"]:
        _fact(table, "chosen", Text(record["chosen"], style="bold green"))
        _fact(table, "because", why(record))
    return table


def _candidates(record: Mapping[str, Any], width: int) -> RenderResult:
    rows: Sequence[Mapping[str, Any]] = record["candidates"]
    names = _names(record)
    unit = " s" if _in_seconds(record) else ""
    labels = ["in seconds" if unit else "", "", *record["terms"], f"cost{unit}", _HELD, "open leases"]
    left = max(len(label) for label in labels) + _GAP
    columns = [(_cells(record, row, names), row["endpoint"] == record["chosen"]) for row in rows]
    widths = [max(map(len, cells)) + _GAP for cells, _ in columns]
    shown = _that_fit(rows, widths, width - left)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(Text(labels[0], style="italic"), no_wrap=True)
    for position in shown:
        cells, chosen = columns[position]
        style = "bold green" if chosen else ""
        table.add_column(Text(cells[0], style=style), justify="right", no_wrap=True, style=style)
    cost_at, zero = len(record["terms"]) + 2, []
    for line, label in enumerate(labels[1:], 1):
        values = [columns[position][0][line] for position in shown]
        if line not in (1, cost_at) and all(cells[line] == _ZERO for cells, _ in columns):
            zero.append(label)
        else:
            bold = "bold" if line == cost_at else ""
            table.add_row(Text(label), *map(Text, values), style=bold)
    yield table
    if zero:
        yield Text(
            "zero: " + ", ".join(label.removesuffix(unit) if unit else label for label in zero), style="dim"
        )
    more = record["candidates_total"] - len(shown)
    if more > 0:
        yield Text(f"and {more} more, see --json", style="dim")


def _cells(record: Mapping[str, Any], row: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Name, role, terms, cost, held, leases."""
    endpoint, fallbacks = row["endpoint"], record["fallbacks"]
    role = "CHOSEN" if endpoint == record["chosen"] else ""
    if endpoint in fallbacks:
        role = f"fallback {fallbacks.index(endpoint) + 1}"
    terms = [_value(term, value) for term, value in zip(record["terms"], row["terms"], strict=False)]
    terms += ["-"] * (len(record["terms"]) - len(terms))
    cost = _seconds(row["cost"]) if _in_seconds(record) else _number(row["cost"])
    return [names[endpoint], role, *terms, cost, _dot(row["matched_tokens"]), _dot(row["leases"])]


def _that_fit(rows: Sequence[Mapping[str, Any]], widths: Sequence[int], room: int) -> list[int]:
    """Positions of the first candidates that fit, two at least. Who holds the longest part of the prompt is among
    them: it is what the choice is to be compared with.
    """
    shown: list[int] = []
    for position, needed in enumerate(widths[:MOST_COLUMNS]):
        if len(shown) >= 2 and needed > room:
            break
        shown.append(position)
        room -= needed
    holder = _holder(rows)
    position = next(index for index, row in enumerate(rows) if row is holder)
    if holder["matched_tokens"] and position not in shown:
        shown[-1] = position
    return shown


def _holder(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(rows, key=lambda row: int(row["matched_tokens"]))


def _removed(record: Mapping[str, Any]) -> RenderResult:
    names = _names(record)
    table = _facts()
    for row in record["removed"]:
        _fact(table, names[row["endpoint"]], row["reason"])
    yield Text("could not take it", style="italic")
    yield table
    more = record["removed_total"] - len(record["removed"])
    if more > 0:
        yield Text(f"and {more} more, see --json", style="dim")


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
        ended = f"{status}{outcome['outcome']} ({outcome['reason']}) from {outcome['endpoint']}"
        _fact(
            table, "outcome", ended + (f", attempt {outcome['attempts']}" if outcome["attempts"] > 1 else "")
        )
        times = (("waited", "waiting_s"), ("first token", "ttft_s"), ("all", "duration_s"))
        told = ", ".join(f"{word} {outcome[name]:.3f} s" for word, name in times if outcome[name] is not None)
        _fact(table, "times", told or "not reported")
        counts = (("in", "input_tokens"), ("of them cached", "cached_tokens"), ("out", "output_tokens"))
        said = ", ".join(f"{word} {outcome[name]}" for word, name in counts if outcome[name] is not None)
        _fact(table, "tokens", said or "not reported")
        details = "" if outcome["details"] == _PLAIN else outcome["details"]
        if outcome["flags"] or details:
            _fact(table, "Envoy", " ".join([*outcome["flags"], details]).strip())
    return table


def _names(record: Mapping[str, Any]) -> dict[str, str]:
    listed = [row["endpoint"] for row in (*record["candidates"], *record["removed"])]
    return short_names([*listed, *([record["chosen"]] if record["chosen"] else [])])


def _in_seconds(record: Mapping[str, Any]) -> bool:
    """The cost is a sum of seconds, not a score."""
    return len(record["terms"]) > 1 and all(term.endswith(" s") for term in record["terms"])


def _facts() -> Table:
    table = Table.grid(padding=(0, _GAP))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _fact(table: Table, name: str, value: str | Text) -> None:
    table.add_row(name, Text(value) if isinstance(value, str) else value)


def _value(term: str, value: float | None) -> str:
    if term.endswith(" s") and not term.endswith(" per s"):
        return _seconds(value)
    return _number(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0:
        return _ZERO
    return "<0.001" if 0 < value < 0.0005 else f"{value:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if value else _ZERO


def _dot(value: int) -> str:
    return str(value) if value else _ZERO
