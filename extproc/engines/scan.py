"""Reads only the wanted families out of a Prometheus text page.

A metrics page of a busy engine is 100 KB of histogram buckets of which we want twenty lines. A full parser
costs tens of milliseconds a page; this one lets the regex engine hop from line start to line start by a
literal prefix.

What it accepts (https://prometheus.io/docs/instrumenting/exposition_formats/ and OpenMetrics 1.0): labels in
any order with escaped quotes, backslashes and line feeds, ``NaN``, ``+Inf``, ``-Inf``, time stamps,
exemplars, CRLF line ends. Lines that are not samples of a wanted name are never looked at, so garbage cannot
hurt; a wanted line whose value is no number is skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_LABELS = r'(?:\{([^"}\n]*(?:"(?:[^"\\\n]|\\.)*"[^"}\n]*)*)\})?'
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(slots=True, frozen=True)
class Sample:
    """One line of the page."""

    labels: Mapping[str, str]
    value: float


@dataclass(slots=True)
class Page:
    """The wanted samples of one page by name. Every question answers None where the page does not say."""

    samples: Mapping[str, list[Sample]] = field(default_factory=dict)

    def of(self, *names: str) -> list[Sample]:
        """Samples with a usable value (finite, not negative) of the first of ``names`` that has any."""
        for name in names:
            found = [
                sample
                for sample in self.samples.get(name, ())
                if math.isfinite(sample.value) and sample.value >= 0
            ]
            if found:
                return found
        return []

    def total(self, *names: str, **where: str) -> float | None:
        """Sum over series (engine ranks, finish reasons) of the first known name, kept to series with these
        labels.
        """
        values = [sample.value for sample in self.of(*names) if _has(sample, where)]
        return sum(values) if values else None

    def highest(self, *names: str, **where: str) -> float | None:
        """The largest value among the series: the fullest rank, the newest start."""
        return max((sample.value for sample in self.of(*names) if _has(sample, where)), default=None)

    def total_by_rank(self, *names: str, rank: str, **where: str) -> float | None:
        """Sum over the values of label ``rank`` of the largest value within each.

        For engines whose tensor-parallel workers each report the numbers of the whole rank.
        """
        ranks: dict[str, float] = {}
        for sample in self.of(*names):
            if _has(sample, where):
                key = sample.labels.get(rank, "")
                ranks[key] = max(ranks.get(key, 0.0), sample.value)
        return sum(ranks.values()) if ranks else None

    def share(self, *names: str) -> float | None:
        """:meth:`highest` as a share in 0..1: an engine that says 1.02 is full."""
        value = self.highest(*names)
        return None if value is None else min(value, 1.0)


class Scanner:
    """Compiled for a fixed set of metric names. Safe to share between threads."""

    def __init__(self, names: Iterable[str]) -> None:
        groups: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            prefix = re.match(r"[^:_]*[:_]?", name)
            head = prefix.group() if prefix else ""
            groups.setdefault(head, []).append(name[len(head) :])
        self._groups = [(head, _pattern(head, tails)) for head, tails in groups.items()]

    def scan(self, text: str) -> Page:
        """The wanted samples of ``text``. Never raises on any text."""
        text = "\n" + text
        found: dict[str, list[Sample]] = {}
        for head, pattern in self._groups:
            for tail, labels, written in pattern.findall(text):
                try:
                    value = float(written)
                except ValueError:
                    continue
                found.setdefault(head + tail, []).append(Sample(_labels(labels), value))
        return Page(found)


def _pattern(head: str, tails: list[str]) -> re.Pattern[str]:
    # A literal start ("\nvllm:") lets the regex engine search by memory comparison instead of trying every
    # line.
    names = "|".join(re.escape(tail) for tail in sorted(tails, key=len, reverse=True))
    return re.compile(rf"\n{re.escape(head)}({names})(?=[{{ \t]){_LABELS}[ \t]*([^\s#{{]+)")


def _labels(text: str) -> dict[str, str]:
    if not text:
        return {}
    pairs = _LABEL.findall(text)
    if "\\" not in text:
        return dict(pairs)
    return {
        name: _ESCAPE.sub(lambda found: "\n" if found.group(1) == "n" else found.group(1), value)
        for name, value in pairs
    }


def _has(sample: Sample, where: Mapping[str, str]) -> bool:
    return all(sample.labels.get(name) == value for name, value in where.items())
