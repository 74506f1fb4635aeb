"""Throughput: the endpoint with most output tokens per second for each of its requests."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.scheduling.strategy import Candidate, Choice, Query
from extproc.scheduling.ties import ranked


class Throughput:
    """``(leases + 1) / rate``: rate is output tokens per second over one minute, over five where the minute
    has none; an endpoint without samples counts as the best one known."""

    terms = ("tokens per s", "leases")

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Most tokens per second and lease first."""
        known = [_rate(candidate, now) for candidate in candidates]
        best = max((rate for rate in known if rate), default=1.0)
        rows = [
            (rate or best, float(candidate.endpoint.leases))
            for rate, candidate in zip(known, candidates, strict=True)
        ]
        return ranked(candidates, [(leases + 1) / rate for rate, leases in rows], rows)


def _rate(candidate: Candidate, now: float) -> float | None:
    stats = candidate.endpoint.stats
    return stats.minute.tokens_per_s(now) or stats.five_minutes.tokens_per_s(now)
