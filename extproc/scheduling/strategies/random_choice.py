"""Random: by weight and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence

from extproc.scheduling.strategy import Candidate, Choice, Query
from extproc.scheduling.ties import ranked


class RandomChoice:
    """A draw without replacement in proportion to the weights: keys ``-log(u) / weight``, smallest first.

    Source: Efraimidis and Spirakis, Weighted random sampling with a reservoir (2006).
    """

    terms = ("draw",)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """In drawn order; a weight of 0 comes last."""
        return ranked(
            candidates,
            [
                self._rng.expovariate(1.0) / weight
                if (weight := candidate.endpoint.spec.weight) > 0
                else float("inf")
                for candidate in candidates
            ],
        )
