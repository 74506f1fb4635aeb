"""Power of two choices: of two endpoints drawn by chance, the one with fewer requests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from extproc.scheduling.strategies.least_requests import share
from extproc.scheduling.strategy import Candidate, Choice, Query
from extproc.scheduling.ties import ranked


class PowerOfTwoChoices:
    """Nearly as even as least requests, without herding when several gateways decide on the same stale view.

    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (2001).
    """

    terms = ("leases per weight",)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """The better of the two drawn, the other one, then the rest by leases per weight."""
        drawn = set(self._rng.sample(range(len(candidates)), min(2, len(candidates))))
        two = [candidate for at, candidate in enumerate(candidates) if at in drawn]
        rest = [candidate for at, candidate in enumerate(candidates) if at not in drawn]
        return ranked(two, map(share, two)) + ranked(rest, map(share, rest))
