"""Weighted round robin: turns by weight, spread evenly in time."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.scheduling.strategy import Candidate, Choice, Query
from extproc.scheduling.ties import ranked


class WeightedRoundRobin:
    """Every endpoint's credit grows by its weight each turn; the highest credit goes first and pays for the
    turn.

    With weights 3 and 1 the order is A A B A, never A A A B ("smooth" weighted round robin).
    """

    terms = ("credit, negative",)

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Highest credit first. Endpoints that are not candidates now keep no credit."""
        credit = {
            candidate.endpoint.key: self._credit.get(candidate.endpoint.key, 0.0)
            + candidate.endpoint.spec.weight
            for candidate in candidates
        }
        choices = ranked(candidates, [-credit[candidate.endpoint.key] for candidate in candidates])
        credit[choices[0].endpoint.key] -= sum(candidate.endpoint.spec.weight for candidate in candidates)
        self._credit = credit
        return choices
