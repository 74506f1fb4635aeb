"""What comes out: summary, JSON, page, and the command itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from extproc.cli import app
from extproc.replay.page import html
from extproc.replay.plots import Bar, Line, bars, lines
from extproc.replay.report import table
from extproc.replay.result import Run, Served, quantile
from extproc.replay.setup import Slo


def served(ttft: float, e2e: float, *, tokens: int = 11, status: int = 200) -> Served:
    ok = status == 200
    return Served("x", 0.0, 0, 100, 50 if ok else 0, tokens if ok else 0, ttft if ok else None, e2e, status)


def result(*rows: Served) -> Run:
    return Run("p", rows, 10.0, Slo(1.0, 0.1), [len(rows), 0], [3.0, 1.0], [(0.0, [1, 0])], trace="t")


def test_quantiles_are_nearest_ranks() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.9), quantile(values, 0.99)) == (50.0, 90.0, 99.0)
    assert quantile([], 0.5) is None


def test_good_service_keeps_both_bounds() -> None:
    assert served(0.9, 1.9).meets(Slo(1.0, 0.1))
    assert not served(1.1, 1.9).meets(Slo(1.0, 0.1))
    assert not served(0.5, 1.6).meets(Slo(1.0, 0.1))
    assert not served(0.1, 0.2, status=503).meets(Slo(1.0, 0.1))


def test_the_summary_counts_failures_and_hits() -> None:
    summary = result(served(0.5, 1.0), served(2.0, 2.5), served(0.0, 0.0, status=503)).summary()
    assert summary["failed"] == 1
    assert summary["hit_ratio"] == 0.5
    assert summary["slo_attained"] == pytest.approx(1 / 3, abs=1e-4)
    assert summary["max_over_mean_load"] == 1.5
    assert (summary["ttft_p50_s"], summary["ttft_p90_s"]) == (0.5, 2.0)


def compared(width: int, *runs: Run) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table("chat", runs))
    return capture.get()


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_table_is_never_cut_and_names_what_it_leaves_out(width: int) -> None:
    text = compared(width, replace(result(served(0.5, 1.0)), policy="production-stack-trie"))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for head in ("hits", "in SLO", "good/s", "max/mean", "failed"):
        assert head in text
    assert ("on a wider screen also: " in text) == (width < 140)


def test_failures_are_shown_however_narrow() -> None:
    text = compared(60, result(served(0.5, 1.0), served(0.0, 0.0, status=503)))
    assert "failed" in text.split("on a wider screen also")[0]


def test_the_help_shows_a_whole_fault_at_80_columns() -> None:
    text = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, ["replay", "--help"]).output
    assert "slow:engine=3:at=60" in text
    assert "down:engine=0:for=9" in text


def test_plots_are_well_formed_and_escape_names() -> None:
    svg = lines("a<b", [Line("<x>", [(0.1, 0.0), (5.0, 1.0)], "#000")], x_title="s", y_title="&", log_x=True)
    ElementTree.fromstring(svg)
    ElementTree.fromstring(bars("t", [Bar("<y>", 0.3, "#000", 0.2, 0.4)], x_title="x", percent=True))
    assert lines("empty", [], x_title="", y_title="") == ""


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = html([result(served(0.5, 1.0), served(0.7, 1.4))])
    assert "<svg" in page
    assert "<script" not in page
    assert "src=" not in page
    assert [part for part in page.split("http")[1:] if not part.startswith("://www.w3.org/2000/svg")] == []


def test_the_command_writes_numbers_and_a_page(tmp_path: Path) -> None:
    numbers, page = tmp_path / "runs.json", tmp_path / "page.html"
    words = ["replay", "chat", "--requests", "60", "--engines", "2", "--policy", "round-robin"]
    words += [
        "--policy",
        "expected-latency:tie_ms=2",
        "--json",
        str(numbers),
        "--html",
        str(page),
        "--explain",
        "5",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    runs = json.loads(numbers.read_text())["runs"]
    assert [(run["trace"], run["policy"]) for run in runs] == [
        ("chat", "round-robin"),
        ("chat", "expected-latency:tie_ms=2"),
    ]
    wanted = {
        "engines",
        "requests",
        "hit_ratio",
        "ttft_p50_s",
        "ttft_p90_s",
        "ttft_p99_s",
        "e2e_p50_s",
        "goodput",
    }
    assert wanted | {"max_over_mean_load"} <= runs[0].keys()
    assert page.read_text().startswith("<!doctype html>")
    assert "CHOSEN" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.jsonl"], "nothing.jsonl"),
        (["chatt"], "did you mean chat? Built in: agents, batch, chat, lora, rag, shared-prompt"),
        (["chat", "--policy", "best"], "best"),
        (["chat", "--engine-preset", "abacus"], "abacus"),
        (["chat", "--fault", "burn"], "burn"),
        (["chat", "--requests", "5", "--policy", "random", "--explain", "99"], "no request 99"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["replay", *words])
    assert done.exit_code == 1
    assert said in done.output
    assert "Traceback" not in done.output
