"""What replicas of one pool learn from each other."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from extproc.fleet.pace import slope_of
from extproc.fleet.rates import Rates

_TOGETHER = 3


def share(members: Sequence[Rates], setting: float | None, now: float) -> None:
    """Give every member what those that have measured know together: the prior of its prefill rate, their median (else
    ``setting``, the pool's, where there is one), and the line of its decode pace. Call it once a second or
    so."""
    measured = [rates.measured for rates in members if rates.fresh(now)]
    if not measured:
        # A fleet that starts has few samples each, but together enough.
        few = [rate for rates in members if rates.seen(now) for rate in rates.samples]
        measured = few if len(few) >= _TOGETHER else []
    if measured:
        prior = median(measured)
        for rates in members:
            rates.learn_prior(prior, now)
    elif setting is not None:
        for rates in members:
            rates.prior = setting
    known = [rates.pace for rates in members if rates.pace.known]
    if known:
        slope = slope_of(known)
        base = median(pace.base(slope) for pace in known)
        for rates in members:
            rates.pace.compare(base, slope)
