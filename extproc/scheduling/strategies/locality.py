"""Locality: endpoints in the request's own zone, as long as they are not much busier."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.scheduling.strategies.least_requests import share
from extproc.scheduling.strategy import Candidate, Choice, Query
from extproc.scheduling.ties import ranked


class Locality:
    """Leases per weight, with ``spill`` leases added to endpoints elsewhere. Without a locality in the
    request, or none of an endpoint, the endpoint counts as elsewhere: then all are equal again. ``prefer`` is
    the gateway's own zone."""

    terms = ("leases per weight", "elsewhere")

    def __init__(self, prefer: str = "", spill: float = 8.0) -> None:
        self._prefer = prefer
        self._spill = spill

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Near and idle first."""
        wanted = query.locality or self._prefer
        rows = [
            (share(candidate), 0.0 if wanted and candidate.endpoint.spec.locality == wanted else self._spill)
            for candidate in candidates
        ]
        return ranked(candidates, [leases + away for leases, away in rows], rows)
