"""A comparison as one HTML page that needs nothing else: numbers, and plots as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from extproc.replay.plots import COLOURS, Bar, Line, bars, lines
from extproc.replay.result import Run

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:13px}td,th{padding:3px 9px;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}svg{margin:4px 8px 4px 0;vertical-align:top}h2{margin-top:2em}
"""
_COLUMNS = (
    ("hit_ratio", "hit ratio"),
    ("ttft_p50_s", "TTFT p50 s"),
    ("ttft_p90_s", "TTFT p90 s"),
    ("ttft_p99_s", "TTFT p99 s"),
    ("tpot_p50_s", "TPOT p50 s"),
    ("e2e_p50_s", "E2E p50 s"),
    ("e2e_p90_s", "E2E p90 s"),
    ("goodput", "good requests/s"),
    ("slo_attained", "within SLO"),
    ("max_over_mean_load", "max/mean load"),
    ("preemptions", "preemptions"),
    ("failed", "failed"),
)
_POINTS = 200


def write_html(runs: Sequence[Run], path: Path) -> None:
    """Write the page."""
    path.write_text(html(runs), "utf-8")


def html(runs: Sequence[Run]) -> str:
    """The page's text."""
    traces = list(dict.fromkeys(run.trace for run in runs))
    sections = [_section(trace, [run for run in runs if run.trace == trace]) for trace in traces]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>extproc replay</title>"
        f"<style>{_STYLE}</style></head><body><h1>Replay: {len(traces)} trace{'s' * (len(traces) > 1)}, "
        f"{len({run.policy for run in runs})} policies</h1>{''.join(sections)}</body></html>\n"
    )


def _section(trace: str, runs: Sequence[Run]) -> str:
    colours = {run.policy: COLOURS[at % len(COLOURS)] for at, run in enumerate(runs)}
    first = runs[0]
    slo = first.slo
    hits = [
        Bar(run.policy, run.hit_ratio, colours[run.policy])
        for run in sorted(runs, key=lambda run: -run.hit_ratio)
    ]
    cdfs = [Line(run.policy, _cdf(run.ttfts), colours[run.policy]) for run in runs]
    within = [Line(run.policy, _attainment(run), colours[run.policy]) for run in runs]
    loads = [_loads(run) for run in runs]
    return (
        f"<h2>{escape(trace)}</h2><p>{len(first.served):,} requests, {len(first.requests_per_engine)} engines. SLO: "
        f"first token within {slo.ttft_s:g} s and {slo.tpot_s:g} s per further token.</p>{_table(runs)}<div>"
        + lines(
            "Time to first token",
            cdfs,
            x_title="seconds",
            y_title="share of requests",
            log_x=True,
            y_top=1.0,
        )
        + bars("Prompt tokens found in the cache", hits, x_title="share", percent=True)
        + lines(
            "Goodput: requests whose first token came in time",
            within,
            x_title="TTFT bound of the SLO, seconds",
            y_title="share of requests",
            log_x=True,
            y_top=1.0,
        )
        + f"</div><h3>Requests in flight per engine</h3><div>{''.join(loads)}</div>"
    )


def _table(runs: Sequence[Run]) -> str:
    head = "".join(f"<th>{title}</th>" for _, title in _COLUMNS)
    rows = []
    for run in runs:
        numbers = run.summary()
        cells = "".join(f"<td>{_cell(numbers[key])}</td>" for key, _ in _COLUMNS)
        rows.append(f"<tr><td>{escape(run.policy)}</td>{cells}</tr>")
    return f"<table><tr><th>policy</th>{head}</tr>{''.join(rows)}</table>"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _cdf(ordered: Sequence[float]) -> list[tuple[float, float]]:
    count = len(ordered)
    step = max(count // _POINTS, 1)
    points = [(ordered[at], (at + 1) / count) for at in range(0, count, step)]
    return [*points, (ordered[-1], 1.0)] if ordered else []


def _attainment(run: Run) -> list[tuple[float, float]]:
    bounds = [0.05 * 1.3**at for at in range(28)]
    return [(bound, run.attained(replace(run.slo, ttft_s=bound))) for bound in bounds]


def _loads(run: Run) -> str:
    engines = len(run.requests_per_engine)
    curves = [
        Line(
            f"engine {at}",
            [(now, float(counts[at])) for now, counts in run.samples],
            COLOURS[at % len(COLOURS)],
            1.0,
        )
        for at in range(min(engines, 32))
    ]
    return lines(
        run.policy,
        curves,
        x_title="seconds",
        y_title="in flight",
        width=372,
        height=220,
        legend=False,
    )
