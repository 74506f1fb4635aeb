"""When a measured difference between replicas is one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

_SAME = 0.3
_ERRORS = 2.0


def beyond_noise(measured: float, usual: float, error: float = 0.0) -> float:
    """``usual`` while the two are within about a third of each other, ``measured`` from a factor of 1.8 on,
    and a smooth way between. Both above 0. Where the standard ``error`` of the measured one's logarithm is large, two
    errors are the same and four are not.

    Estimates of equal replicas differ by tens of percent. Acting on that sends traffic after noise; a replica
    that is really slower differs by more. ("Firm" shrinkage: Gao and Bruce, 1997.)
    """
    same = max(_SAME, _ERRORS * error)
    sure = 2 * same
    off = math.log(measured / usual)
    size = abs(off)
    if size <= same:
        return usual
    if size >= sure:
        return measured
    return usual * math.exp(math.copysign(sure * (size - same) / (sure - same), off))


def median_error(samples: Iterable[float]) -> float:
    """Standard error of the logarithm of the samples' median, by their median deviation; all above 0.

    For normal noise the median's error is 1.25 times the mean's, and the standard deviation 1.48 times the median one.
    """
    logs = [math.log(sample) for sample in samples]
    middle = median(logs)
    return 1.25 * 1.48 * median(abs(value - middle) for value in logs) / math.sqrt(len(logs))
