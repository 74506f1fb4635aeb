"""Adaptive: slow, failing and busy endpoints get less, by what the last minutes showed."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.scheduling.strategies.queue_depth import depth
from extproc.scheduling.strategy import Candidate, Choice, Query
from extproc.scheduling.ties import ranked

_LEAST_SUCCESS = 0.05


class Adaptive:
    """``p99 / success^2 * (leases + waiting + 1)``: the slow end of the durations (five minutes), stretched
    by the attempts it takes to succeed (one minute, else five; squared because a failure also costs the
    client its time), for every request that shares the endpoint. Unknown values count as the mean of the
    known ones."""

    terms = ("p99 s", "success", "requests")

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Lowest product first."""
        slow = _filled(
            [candidate.endpoint.stats.five_minutes.duration_s(0.99, now) for candidate in candidates]
        )
        success = _filled([_success(candidate, now) for candidate in candidates])
        requests = [candidate.endpoint.leases + depth(candidate, now) for candidate in candidates]
        rows = list(zip(slow, success, requests, strict=True))
        costs = [p99 / max(share, _LEAST_SUCCESS) ** 2 * (busy + 1) for p99, share, busy in rows]
        return ranked(candidates, costs, rows)


def _success(candidate: Candidate, now: float) -> float | None:
    stats = candidate.endpoint.stats
    share = stats.minute.success(now)
    return stats.five_minutes.success(now) if share is None else share


def _filled(values: list[float | None]) -> list[float]:
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else 1.0
    return [mean if value is None else value for value in values]
