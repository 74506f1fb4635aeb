"""Plots as inline SVG, drawn by hand: lines, bars, and several small ones side by side. No library, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = (
    "#c0392b",
    "#2471a3",
    "#1e8449",
    "#b7950b",
    "#7d3c98",
    "#ca6f1e",
    "#17a589",
    "#5d6d7e",
    "#a04000",
    "#2e4053",
    "#d2527f",
    "#6c7a89",
    "#87a922",
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 28, 40
_FONT = "font-family='system-ui,sans-serif'"


@dataclass(slots=True, frozen=True)
class Line:
    """A named curve."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 1.5


@dataclass(slots=True, frozen=True)
class Bar:
    """A named value, with an interval where it was measured more than once."""

    name: str
    value: float
    colour: str
    low: float | None = None
    high: float | None = None


def lines(
    title: str,
    curves: Sequence[Line],
    *,
    x_title: str,
    y_title: str,
    log_x: bool = False,
    y_top: float | None = None,
    width: int = 560,
    height: int = 320,
    legend: bool = True,
) -> str:
    """Curves over a linear or logarithmic x axis; y starts at 0."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return ""
    xs = [x for x, _ in points if x > 0 or not log_x]
    low_x, high_x = min(xs, default=1.0), max(xs, default=1.0)
    if log_x:
        low_x, high_x = max(low_x, high_x / 1e5), max(high_x, low_x * 1.01)
    top = y_top or max(y for _, y in points) * 1.05 or 1.0
    side = 150 if legend else 0
    plot_w, plot_h = width - _LEFT - _RIGHT - side, height - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        if log_x:
            share = math.log(max(x, low_x) / low_x) / math.log(high_x / low_x)
        else:
            share = (x - low_x) / (high_x - low_x or 1.0)
        return _LEFT + share * plot_w, _TOP + plot_h * (1 - min(y / top, 1.0))

    parts = [_text(_LEFT, 16, title, size=13, weight="bold")]
    for tick in _ticks(0.0, top):
        _, y = place(low_x, tick)
        parts += [_rule(_LEFT, y, _LEFT + plot_w, y), _text(_LEFT - 5, y + 4, _number(tick), anchor="end")]
    for tick in _log_ticks(low_x, high_x) if log_x else _ticks(low_x, high_x):
        x, _ = place(tick, 0.0)
        parts += [
            _rule(x, _TOP, x, _TOP + plot_h),
            _text(x, _TOP + plot_h + 14, _number(tick), anchor="middle"),
        ]
    for at, curve in enumerate(curves):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve.points))
        parts.append(
            f"<polyline points='{path}' fill='none' stroke='{curve.colour}' stroke-width='{curve.width}'>"
            f"<title>{escape(curve.name)}</title></polyline>"
        )
        if legend:
            y = _TOP + 10 + 16 * at
            x = _LEFT + plot_w + 10
            parts += [
                f"<rect x='{x}' y='{y - 7}' width='12' height='4' fill='{curve.colour}'/>",
                _text(x + 17, y, curve.name),
            ]
    parts += [
        _text(_LEFT + plot_w / 2, height - 6, x_title, anchor="middle"),
        _text(12, _TOP + plot_h / 2, y_title, anchor="middle", turn=True),
    ]
    return _svg(parts, width, height)


def bars(title: str, values: Sequence[Bar], *, x_title: str, width: int = 560, percent: bool = False) -> str:
    """Horizontal bars, in the order given."""
    if not values:
        return ""
    left, row = 170, 20
    height = _TOP + row * len(values) + 34
    top = max((bar.high or bar.value for bar in values), default=1.0) * 1.12 or 1.0
    plot_w = width - left - _RIGHT
    parts = [_text(8, 16, title, size=13, weight="bold")]
    for at, bar in enumerate(values):
        y = _TOP + row * at
        length = plot_w * bar.value / top
        text = f"{bar.value:.1%}" if percent else _number(bar.value)
        parts += [
            _text(left - 6, y + 13, bar.name, anchor="end"),
            f"<rect x='{left}' y='{y + 3}' width='{length:.1f}' height='{row - 7}' fill='{bar.colour}'/>",
            _text(left + length + 4, y + 13, text),
        ]
        if bar.low is not None and bar.high is not None and bar.high > bar.low:
            x1, x2 = left + plot_w * bar.low / top, left + plot_w * bar.high / top
            parts.append(
                f"<path d='M{x1:.1f} {y + 9.5}H{x2:.1f}' stroke='#222' stroke-width='1.5' fill='none'/>"
            )
    parts.append(_text(left + plot_w / 2, height - 8, x_title, anchor="middle"))
    return _svg(parts, width, height)


def _svg(parts: Sequence[str], width: int, height: int) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
        f" role='img'><rect width='{width}' height='{height}' fill='#fff'/>{''.join(parts)}</svg>"
    )


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 11,
    anchor: str = "start",
    weight: str = "normal",
    turn: bool = False,
) -> str:
    turned = f" transform='rotate(-90 {x:.1f} {y:.1f})'" if turn else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {_FONT} font-size='{size}' font-weight='{weight}' text-anchor='{anchor}'"
        f" fill='#222'{turned}>{escape(words)}</text>"
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f"<path d='M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}' stroke='#ddd' fill='none'/>"


def _ticks(low: float, high: float) -> list[float]:
    span = high - low
    if span <= 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 5)
    first = math.ceil(low / step)
    return [step * at for at in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    return [
        value
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        if low <= (value := 10.0**power) <= high
    ] or [low, high]


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 10_000 else f"{value:,.0f}"
