"""Numbers of a benchmark: percentiles, histogram, confidence intervals, tables.

Rules of this file:

- a percentile of nothing is ``nan``, never zero, and is printed as a dash;
- intervals come from independent slices or rounds, not from single requests: requests of one slice share
  its weather;
- intervals are 95 %, two-sided, Student's t on the slices (on their logarithms for ratios).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# 97.5 % quantiles of Student's t for 1..30 degrees of freedom; beyond, the normal one is close enough.
_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
_T += (
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)

_BUCKETS_PER_E = 50
"""Histogram buckets per factor e: a bucket is 2 % wide."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0..1) of the sorted or unsorted values lie; linear between
    neighbours."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class Histogram:
    """Counts of positive values in buckets 2 % wide: memory does not grow with the number of values."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0

    def record(self, value: float) -> None:
        """Count one value; values below a nanosecond count as that."""
        bucket = math.floor(math.log(max(value, 1e-9)) * _BUCKETS_PER_E)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.total += 1

    def add(self, other: Histogram) -> None:
        """Take over the counts of another histogram."""
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.total += other.total

    def percentile(self, share: float) -> float:
        """As the function of that name, within the width of a bucket."""
        if not self.total:
            return math.nan
        wanted = share * (self.total - 1)
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen > wanted:
                return math.exp((bucket + 0.5) / _BUCKETS_PER_E)
        raise AssertionError("counts do not add up")


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval; the ends are ``nan`` when fewer than two values were there."""

    mean: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """The same in another unit."""
        return Interval(self.mean * factor, self.low * factor, self.high * factor)


def interval(values: Sequence[float]) -> Interval:
    """Mean of independent values with its interval; values that are ``nan`` are left out."""
    kept = [value for value in values if not math.isnan(value)]
    if not kept:
        return Interval(math.nan, math.nan, math.nan)
    mean = sum(kept) / len(kept)
    if len(kept) < 2:
        return Interval(mean, math.nan, math.nan)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in kept) / (len(kept) - 1))
    degrees = len(kept) - 1
    half = (_T[degrees - 1] if degrees <= len(_T) else 1.96) * deviation / math.sqrt(len(kept))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(pairs: Iterable[tuple[float, float]]) -> Interval:
    """Geometric mean of second / first over paired slices, with its interval."""
    logs = [math.log(b / a) for a, b in pairs if a > 0 and b > 0]
    found = interval(logs)
    return Interval(math.exp(found.mean), math.exp(found.low), math.exp(found.high))


def number(value: float, digits: int = 2) -> str:
    """A number for a table; ``nan`` is a dash."""
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def with_interval(value: Interval, digits: int = 2) -> str:
    """``mean [low, high]`` for a table."""
    if math.isnan(value.low):
        return number(value.mean, digits)
    return f"{number(value.mean, digits)} [{number(value.low, digits)}, {number(value.high, digits)}]"


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain text table: first column to the left, others to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = []
    for line in lines:
        cells = [
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([title, *text]) if title else "\n".join(text)


def write_json(path: str | None, result: Mapping[str, object]) -> None:
    """Write a result beside the table if a file was asked for; ``nan`` becomes null."""
    if path is None:
        return
    Path(path).write_text(json.dumps(_plain(result), indent=1) + "\n")
    print(f"written: {path}", file=sys.stderr)


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Interval):
        return {"mean": _plain(value.mean), "low": _plain(value.low), "high": _plain(value.high)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
