"""Least requests: fewest open leases for the endpoint's weight."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.scheduling.strategy import Candidate, Choice, Query
from extproc.scheduling.ties import ranked


class LeastRequests:
    """``(leases + 1) / weight``: the share of the endpoint that would be in use with this request on it."""

    terms = ("leases per weight",)

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Fewest leases per weight first. A weight of 0 comes last."""
        return ranked(candidates, [share(candidate) for candidate in candidates])


def share(candidate: Candidate) -> float:
    """Leases per weight with the request counted in."""
    weight = candidate.endpoint.spec.weight
    return (candidate.endpoint.leases + 1) / weight if weight > 0 else float("inf")
