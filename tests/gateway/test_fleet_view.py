"""``extproc fleet`` on narrow and wide screens."""

from __future__ import annotations

import time
from typing import Any

import pytest
from rich.console import Console

from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.fleet_view import fleet_table
from extproc.outcome import Outcome
from extproc.telemetry.fleet_report import fleet_report
from extproc.telemetry.short_names import short_names


def endpoint(name: str, served: int, pool: str = "chat") -> Endpoint:
    made = Endpoint(EndpointSpec(name, f"{name}:8000", pool), 0)
    for _ in range(served):
        made.stats.record(0.125, 1.0, 10, Outcome.SUCCESS, time.monotonic())
    return made


def shown(endpoints: list[Endpoint], width: int) -> list[str]:
    rows: list[dict[str, Any]] = fleet_report(endpoints, time.monotonic())
    console = Console(width=width)
    with console.capture() as capture:
        console.print(fleet_table(rows))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_at_80_columns_every_important_word_is_whole() -> None:
    lines = shown([endpoint("engine-1", 30), endpoint("engine-2", 10)], 80)
    for word in ("endpoint", "state", "open", "ended 1m", "share", "backlog s", "hits", "KV", "TTFT 1m"):
        assert word in lines[0].split("  ") or f" {word} " in f"{lines[0]} "
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_cell_is_cut_at_any_width(width: int) -> None:
    lines = shown([endpoint("engine-1", 3), endpoint("engine-2", 1, pool="embeddings")], width)
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= width


def test_a_wide_screen_shows_all_columns_and_a_narrow_one_says_what_it_leaves_out() -> None:
    wide, narrow = shown([endpoint("engine-1", 1)], 160), shown([endpoint("engine-1", 1)], 80)
    assert "scraped" in wide[0]
    assert "wider" not in "".join(wide)
    assert "scraped" not in narrow[0]
    assert "on a wider screen also: " in "".join(narrow)
    assert "scraped" in "".join(narrow[1:])


def test_it_says_what_went_where() -> None:
    lines = shown([endpoint("engine-1", 30), endpoint("engine-2", 10)], 80)
    first = next(line for line in lines if line.startswith("engine-1"))
    assert "30" in first.split()
    assert "75%" in first.split()
    assert "2 endpoints, 0 requests open, 40 ended in the last minute" in lines


def test_unknown_is_a_dash_not_zero() -> None:
    line = shown([endpoint("engine-1", 0)], 80)[2].split()
    assert line.count("-") >= 4, "share, hits, KV and TTFT are not known"


def test_pools_are_told_apart_where_there_are_several() -> None:
    assert "pool" not in shown([endpoint("engine-1", 0)], 80)[0]
    assert "pool" in shown([endpoint("engine-1", 0), endpoint("engine-2", 0, "embeddings")], 80)[0]


def test_an_empty_fleet_is_no_error() -> None:
    assert "0 endpoints, 0 requests open, 0 ended in the last minute" in shown([], 80)


def test_one_endpoint_is_not_called_endpoints() -> None:
    assert "1 endpoint, 0 requests open, 3 ended in the last minute" in shown([endpoint("engine-1", 3)], 80)


def test_on_a_low_screen_the_last_endpoints_make_way_but_are_counted() -> None:
    rows = fleet_report([endpoint(f"engine-{number}", 1) for number in range(5)], time.monotonic())
    console = Console(width=80)
    with console.capture() as capture:
        console.print(fleet_table(rows, most_rows=2))
    text = capture.get()
    assert "engine-1" in text
    assert "engine-2" not in text
    assert "and 3 more; 5 endpoints, 0 requests open, 5 ended in the last minute" in text


def test_names_are_as_short_as_can_be_told_apart() -> None:
    assert short_names(["a/1.1.1.1:80", "b/1.1.1.2:80"]) == {"a/1.1.1.1:80": "a", "b/1.1.1.2:80": "b"}
    assert short_names(["a/1.1.1.1:80", "a/1.1.1.2:80"]) == {
        "a/1.1.1.1:80": "1.1.1.1:80",
        "a/1.1.1.2:80": "1.1.1.2:80",
    }
    mixed = ["a/1.1.1.1:80", "a/1.1.1.2:80", "b/1.1.1.3:80"]
    assert list(short_names(mixed).values()) == ["a/1.1.1.1:80", "a/1.1.1.2:80", "b"]
    assert short_names([]) == {}
