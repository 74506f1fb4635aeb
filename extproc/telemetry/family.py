"""A labelled metric with its series at hand, and label values that clients cannot multiply.

Looking a series up in the client library takes a lock and builds a tuple of strings, about a microsecond
each; here it is one dictionary lookup.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from prometheus_client import Counter, Gauge, Histogram

Metric = TypeVar("Metric", Counter, Gauge, Histogram)

OTHER = "other"


class Family(Generic[Metric]):
    """Series of one metric by their label values. To be used on one thread."""

    def __init__(self, metric: Metric) -> None:
        self.metric: Metric = metric
        self._names: tuple[str, ...] = tuple(metric._labelnames)
        self._series: dict[tuple[str, ...], Metric] = {}

    def of(self, *values: str) -> Metric:
        """The series with these label values, made when it is new."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self.metric.labels(*values)
        return series

    def keep(self, label: str, values: frozenset[str]) -> None:
        """Forget every series whose ``label`` has none of these values."""
        position = self._names.index(label)
        for key in [key for key in self._series if key[position] not in values]:
            del self._series[key]
            self.metric.remove(*key)


class CappedLabel:
    """At most ``cap`` different values; later ones become ``other``. ``known`` values always have a place."""

    def __init__(self, cap: int = 200) -> None:
        self.cap = cap
        self._known: frozenset[str] = frozenset()
        self._seen: set[str] = set()

    def know(self, values: frozenset[str]) -> None:
        """Values that come from the configuration and therefore need no cap."""
        self._known = values

    def of(self, value: str) -> str:
        """``value``, or ``other`` once the cap is reached."""
        if value in self._known or value in self._seen:
            return value
        if len(self._seen) >= self.cap:
            return OTHER
        self._seen.add(value)
        return value
