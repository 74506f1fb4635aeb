"""How decoding slows down with the number of streams, on one endpoint.

Rules of this file:

- a sample is one scrape interval: seconds per output token of a stream, with the time spent on prefill taken
  out (that comes from the prompts sent there, and would make every cache miss look like slow decoding), and
  the mean number of running streams;
- ``slope`` is a ridge regression of the first over the second, towards a prior, with slow forgetting;
- slopes of single endpoints are noisy, for load hardly varies. Peers share the median of their lines, and an
  endpoint differs from it by the ratio of its own pace to what that line says, and only when it differs by
  more than noise.
"""

from __future__ import annotations

from extproc.fleet.noise import beyond_noise

PRIOR_SLOPE = 0.0002
"""Seconds per output token for every further stream: 8B to 70B models on current GPUs go from about 8-20 ms a
token alone to 25-45 ms with a hundred streams."""

_RIDGE = 400.0
_FORGET = 0.98
_RANGE = 5.0
_FEW = 5


class Pace:
    """``slowdown`` is what the cost uses: seconds per output token and stream."""

    __slots__ = ("_cross", "_spread", "level", "samples", "slope", "slowdown", "streams")

    def __init__(self) -> None:
        self.slowdown = PRIOR_SLOPE
        self.slope = PRIOR_SLOPE
        """The endpoint's own regression."""
        self.streams = 0.0
        """Mean number of streams in the samples."""
        self.level = 0.0
        """Mean seconds per output token in the samples."""
        self.samples = 0
        self._spread = 0.0
        self._cross = 0.0

    @property
    def known(self) -> bool:
        """Enough samples to be compared with peers."""
        return self.samples >= _FEW

    @property
    def base(self) -> float:
        """Seconds per output token without other streams, by the endpoint's own line."""
        return max(self.level - self.slope * self.streams, 0.0)

    def observe(self, pace: float, streams: float) -> None:
        """One sample."""
        self.samples += 1
        step = 1.0 / min(self.samples, 16)
        off = streams - self.streams if self.samples > 1 else 0.0
        self.streams += (streams - self.streams) * step
        self.level += (pace - self.level) * step
        self._spread = self._spread * _FORGET + off * (streams - self.streams)
        self._cross = self._cross * _FORGET + off * (pace - self.level)
        slope = (self._cross + _RIDGE * PRIOR_SLOPE) / (self._spread + _RIDGE)
        self.slope = min(max(slope, PRIOR_SLOPE / _RANGE), PRIOR_SLOPE * _RANGE)

    def compare(self, base: float, slope: float) -> None:
        """Take over the peers' line, scaled by how this endpoint keeps to it."""
        expected = base + slope * self.streams
        ratio = self.level / expected if self.known and expected > 0.0 else 1.0
        self.slowdown = slope * beyond_noise(min(max(ratio, 0.05), 20.0), 1.0)
