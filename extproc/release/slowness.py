"""Is the candidate's p99 of the time to first token more than ``ratio`` times the baseline's?

Rules of this file:

- the question becomes one of two rates: how often the baseline's time, and how often the candidate's time divided by
  ``ratio``, exceeds one and the same threshold near the baseline's p99. If the candidate's p99 is at most ``ratio`` times
  the baseline's, its rate is not higher;
- the threshold is the p99 of the baseline's last ``WINDOW`` times *before* the stretch in which it is used, so it does not
  depend on what is being compared; it follows slow changes of load. In a surge both rates rise together;
- nothing is said before ``LEAST_FOR_P99`` times of the baseline.
"""

from __future__ import annotations

import math
from collections import deque

from extproc.release.contrast import Contrast

WINDOW = 2000
LEAST_FOR_P99 = 300
_QUANTILE = 0.99


class Slowness:
    """See the rules above. ``alpha`` as in :class:`Contrast`."""

    def __init__(self, ratio: float, alpha: float) -> None:
        self.ratio = ratio
        rare = (1 - _QUANTILE) * _QUANTILE
        self.contrast = Contrast(0.0, alpha, floor=rare)
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._threshold: float | None = None

    def add(self, *, candidate: bool, ttft_s: float) -> None:
        """One time to first token, in seconds."""
        if not candidate:
            self._recent.append(ttft_s)
        if self._threshold is not None:
            shown = ttft_s / self.ratio if candidate else ttft_s
            self.contrast.add(candidate=candidate, value=float(shown > self._threshold))

    def close(self) -> None:
        """A stretch of time ends: count it, and move the threshold."""
        self.contrast.close()
        if len(self._recent) >= LEAST_FOR_P99:
            ordered = sorted(self._recent)
            self._threshold = ordered[math.ceil(_QUANTILE * len(ordered)) - 1]
