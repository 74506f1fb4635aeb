"""A metric that we count ourselves, with its series at hand, and label values that clients cannot multiply.

Rules of this file:

- counting is on the path of every request: a series is found by one dictionary lookup and changed by one addition,
  without the lock and the checks of the client library (several times as much). All of it happens on one thread;
- reading may happen on another: it sees each number as it was at some moment of the reading;
- the page is as the client library would write it, ``_created`` included.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, Protocol, Self, TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

OTHER = "other"


class Series(Protocol):
    """One series of a metric."""

    kind: str
    """The metric's type, in Prometheus' words."""

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """(suffix of the name, labels beside the series' own, value)."""
        ...


class Count:
    """A running total."""

    __slots__ = ("since", "value")
    kind = "counter"

    def __init__(self) -> None:
        self.value = 0.0
        self.since = time.time()
        """Unix time of the first look at it."""

    def inc(self, by: float = 1.0) -> None:
        """Count; ``by`` is not negative."""
        self.value += by

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """See :class:`Series`."""
        yield "_total", {}, self.value
        yield "_created", {}, self.since


class Spread:
    """How values spread over buckets; ``bounds`` are their upper ends, ascending, without the infinite one."""

    __slots__ = ("_bounds", "_counts", "_sum", "since")
    kind = "histogram"

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self.since = time.time()
        """Unix time of the first look at it."""

    @classmethod
    def over(cls, bounds: Sequence[float]) -> Callable[[], Self]:
        """Makes series with these bounds."""
        return lambda: cls(bounds)

    def observe(self, value: float) -> None:
        """Count one value; a bound belongs to its bucket."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """See :class:`Series`."""
        total, upto = self._sum, list(accumulate(self._counts))
        for bound, count in zip((*self._bounds, float("inf")), upto, strict=True):
            yield "_bucket", {"le": str(floatToGoString(bound))}, float(count)  # type: ignore[no-untyped-call]
        yield "_count", {}, float(upto[-1])
        yield "_sum", {}, total
        yield "_created", {}, self.since


S = TypeVar("S", Count, Spread)


class Family(Collector, Generic[S]):
    """Series of one metric by their label values. A metric without labels has its one series from the start."""

    def __init__(self, make: Callable[[], S], name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self._make: Callable[[], S] = make
        self._kind = make().kind
        self._series: dict[tuple[str, ...], S] = {}
        if not labels:
            self.of()

    def of(self, *values: str) -> S:
        """The series with these label values, made when it is new."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._make()
        return series

    def keep(self, label: str, values: frozenset[str]) -> None:
        """Forget every series whose ``label`` has none of these values."""
        position = self.labels.index(label)
        for key in [key for key in self._series if key[position] not in values]:
            del self._series[key]

    def describe(self) -> Iterator[Metric]:
        """The metric without samples."""
        yield Metric(self.name, self.text, self._kind)

    def collect(self) -> Iterator[Metric]:
        """The metric as it stands, for the registry."""
        metric = Metric(self.name, self.text, self._kind)
        for values, series in list(self._series.items()):
            labels = dict(zip(self.labels, values, strict=True))
            for suffix, more, value in series.samples():
                metric.add_sample(self.name + suffix, labels | more, value)
        yield metric


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
