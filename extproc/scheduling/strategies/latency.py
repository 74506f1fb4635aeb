"""Latency: the shortest TTFT in the last minute."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.scheduling.strategy import Candidate, Choice, Query
from extproc.scheduling.ties import ranked


class Latency:
    """Mean TTFT of streamed requests over one minute, over five where the minute has none, times leases + 1:
    without the leases everything would run to the endpoint that was fastest a minute ago. An endpoint without
    samples counts as the best one known, so that it is tried."""

    terms = ("ttft s", "leases")

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Lowest product first."""
        known = [ttft_s(candidate, now) for candidate in candidates]
        best = min((value for value in known if value is not None), default=0.0)
        values = [best if value is None else value for value in known]
        # Rounded up to a millisecond, an unknown and a very fast endpoint still differ by their leases.
        rows = [
            (value, float(candidate.endpoint.leases))
            for value, candidate in zip(values, candidates, strict=True)
        ]
        return ranked(candidates, [max(value, 0.001) * (leases + 1) for value, leases in rows], rows)


def ttft_s(candidate: Candidate, now: float) -> float | None:
    """Mean TTFT, the short window first; None without samples."""
    stats = candidate.endpoint.stats
    value = stats.minute.ttft_s(now)
    return stats.five_minutes.ttft_s(now) if value is None else value
