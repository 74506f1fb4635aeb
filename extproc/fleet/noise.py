"""When a measured difference between replicas is one."""

from __future__ import annotations

import math

_SAME = 0.3
_SURE = 0.6


def beyond_noise(measured: float, usual: float) -> float:
    """``usual`` while the two are within about a third of each other, ``measured`` from a factor of 1.8 on,
    and a smooth way between. Both above 0.

    Estimates of equal replicas differ by tens of percent. Acting on that sends traffic after noise; a replica
    that is really slower differs by more. ("Firm" shrinkage: Gao and Bruce, 1997.)
    """
    off = math.log(measured / usual)
    size = abs(off)
    if size <= _SAME:
        return usual
    if size >= _SURE:
        return measured
    return usual * math.exp(math.copysign(_SURE * (size - _SAME) / (_SURE - _SAME), off))
