"""How decoding slows down with the number of streams, on one endpoint.

Rules of this file:

- a sample is one scrape interval: seconds per output token of a stream, with the time spent on prefill taken
  out (that comes from the prompts sent there, and would make every cache miss look like slow decoding), and
  the mean number of running streams;
- engines count a prompt when it is done, so a long one makes some intervals look far too slow and others too fast.
  Therefore medians: of the newest samples' pace and streams, and of the slopes from that middle to each sample,
  weighted by how far its load was from the middle (the line of least absolute deviations through the middle);
- load hardly varies on one endpoint, so peers share one slope, the median of theirs by the same weights with a prior,
  and the median of their levels. How fast each is in itself does not matter to the slope;
- an endpoint differs from the peers' line by the ratio of its own pace to what the line says for its streams, and only
  when it differs by more than noise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from extproc.fleet.noise import beyond_noise

PRIOR_SLOPE = 0.0002
"""Seconds per output token for every further stream: 8B to 70B models on current GPUs go from about 8-20 ms a
token alone to 25-45 ms with a hundred streams."""

_PRIOR_WEIGHT = 40.0
"""Streams: as much as one endpoint tells whose load was off by two in twenty samples."""
_RANGE = 5.0
_WINDOW = 32
_FEW = 5


def slope_of(paces: Iterable[Pace]) -> float:
    """Seconds per output token for every further stream, by all of them together."""
    slopes = [(pace.slope, pace.weight) for pace in paces if pace.weight > 0.0]
    slope = _weighted_median([*slopes, (PRIOR_SLOPE, _PRIOR_WEIGHT)])
    return min(max(slope, PRIOR_SLOPE / _RANGE), PRIOR_SLOPE * _RANGE)


class Pace:
    """``slowdown`` is what the cost uses: seconds per output token and stream."""

    __slots__ = ("_window", "level", "samples", "slope", "slowdown", "streams", "weight")

    def __init__(self) -> None:
        self.slowdown = PRIOR_SLOPE
        self.slope = PRIOR_SLOPE
        """By its own samples."""
        self.weight = 0.0
        """What they tell of it: how far their streams were from the middle, in sum."""
        self.streams = 0.0
        """Usual number of streams in the samples."""
        self.level = 0.0
        """Usual seconds per output token in the samples."""
        self.samples = 0
        self._window: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    @property
    def known(self) -> bool:
        """Enough samples to be compared with peers."""
        return self.samples >= _FEW

    def base(self, slope: float) -> float:
        """Seconds per output token without other streams, by a line of this slope."""
        return max(self.level - slope * self.streams, 0.0)

    def observe(self, pace: float, streams: float) -> None:
        """One sample."""
        self.samples += 1
        self._window.append((streams, pace))
        self.streams = median(sample[0] for sample in self._window)
        self.level = median(sample[1] for sample in self._window)
        off = [(sample[0] - self.streams, sample[1] - self.level) for sample in self._window]
        slopes = [(rise / run, abs(run)) for run, rise in off if abs(run) > 0.5]
        self.weight = sum(weight for _, weight in slopes)
        if slopes:
            self.slope = _weighted_median(slopes)

    def compare(self, base: float, slope: float) -> None:
        """Take over the peers' line, scaled by how this endpoint keeps to it."""
        expected = base + slope * self.streams
        ratio = self.level / expected if self.known and expected > 0.0 else 1.0
        self.slowdown = slope * beyond_noise(min(max(ratio, 0.05), 20.0), 1.0)


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """Of (value, weight)."""
    values = sorted(values)
    half = sum(weight for _, weight in values) / 2
    for value, weight in values:
        half -= weight
        if half <= 0.0:
            return value
    return values[-1][0]
