"""Weighted split: versions share the requests by weight; inside a version another strategy chooses."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from xxhash import xxh3_64_intdigest

from extproc.scheduling.strategy import Candidate, Choice, Query, Strategy


class WeightedSplit:
    """``weights``: version -> share; versions that are not named have none. The affinity key keeps to its
    version while the weights stay; requests without one are thrown by chance."""

    def __init__(self, weights: Mapping[str, float], within: Strategy, rng: random.Random) -> None:
        self._weights = dict(weights)
        self._within = within
        self._rng = rng

    @property
    def terms(self) -> tuple[str, ...]:
        """Those of the strategy inside the version."""
        return self._within.terms

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """The picked version's endpoints first, then the others', each ranked by the strategy inside."""
        version = self._pick(query, {candidate.endpoint.spec.version for candidate in candidates})
        if version is None:
            return self._within.rank(query, candidates, now)
        picked = [candidate for candidate in candidates if candidate.endpoint.spec.version == version]
        others = [candidate for candidate in candidates if candidate.endpoint.spec.version != version]
        choices = self._within.rank(query, picked, now)
        return choices + self._within.rank(query, others, now) if others else choices

    def _pick(self, query: Query, present: set[str]) -> str | None:
        names = sorted(name for name in present if self._weights.get(name, 0.0) > 0.0)
        if not names:
            return None
        if query.affinity_key:
            point = xxh3_64_intdigest(query.affinity_key.encode()) / 2.0**64
        else:
            point = self._rng.random()
        point *= sum(self._weights[name] for name in names)
        for name in names:
            point -= self._weights[name]
            if point < 0.0:
                return name
        return names[-1]
