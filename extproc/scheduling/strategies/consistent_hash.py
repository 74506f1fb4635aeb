"""Consistent hash with bounded load: a key keeps to its endpoint until that has more than its share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from extproc.scheduling.strategies.least_requests import LeastRequests
from extproc.scheduling.strategy import Candidate, Choice, Query

_FEW = 4
"""With fewer leases than this an endpoint is never over its share: a share of next to nothing means nothing, and the
record of a session's last request may still be on its way when the next one comes."""


class ConsistentHash:
    """Rendezvous hashing of the affinity key: each endpoint's score is ``-weight / log(hash)``, highest
    first, so that an endpoint that comes or goes moves only its own keys. Endpoints at ``bound`` times their
    fair share of leases are passed over. Requests without a key go by least requests.

    Sources: Thaler and Ravishankar (1998); Mirrokni et al., Consistent Hashing with Bounded Loads (2018).
    """

    terms = ("order", "over bound")

    def __init__(self, bound: float = 1.25) -> None:
        self._bound = bound
        self._keyless = LeastRequests()

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """The key's endpoints in its own order, those over the bound behind all others."""
        if not query.affinity_key:
            return [
                Choice(choice.endpoint, choice.cost, (0.0, 0.0), choice.matched_tokens)
                for choice in self._keyless.rank(query, candidates, now)
            ]
        key = xxh3_64_intdigest(query.affinity_key.encode())
        leases = 1 + sum(candidate.endpoint.leases for candidate in candidates)
        weights = sum(max(candidate.endpoint.spec.weight, 0.0) for candidate in candidates) or 1.0
        rows = []
        for at, candidate in enumerate(candidates):
            endpoint = candidate.endpoint
            weight = max(endpoint.spec.weight, 0.0)
            most = max(math.ceil(self._bound * leases * weight / weights), _FEW)
            uniform = (xxh3_64_intdigest(endpoint.key.encode(), key) + 1) / (2.0**64 + 2)
            score = -math.log(uniform) / weight if weight > 0 else float("inf")
            rows.append((float(endpoint.leases + 1 > most), score, at))
        rows.sort()
        return [
            Choice(candidates[at].endpoint, float(order), (float(order), over), candidates[at].matched_tokens)
            for order, (over, _, at) in enumerate(rows)
        ]
