"""The default: the endpoint where the request starts, and then streams, soonest."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.scheduling.adapters import AdapterTerm
from extproc.scheduling.cost import (
    STREAM_WEIGHT,
    DecodeTerm,
    PrefillTerm,
    PressureTerm,
    QueueTerm,
    Scene,
    SlotsTerm,
    StallTerm,
    Term,
)
from extproc.scheduling.sessions import SessionTerm
from extproc.scheduling.strategy import Candidate, Choice, Query


class ExpectedLatency:
    """Sum of the cost terms in seconds. Warm caches and load are one currency: a hot prefix goes to a second
    replica when waiting for the first costs more than computing the prefix again, and not before.

    Costs within ``tie_s`` of the lowest are equal: nothing is known to the millisecond. Equals go by fewest
    leases, then rotation.
    """

    def __init__(
        self, *, tie_s: float = 0.001, adapter_load_s: float = 0.5, stream_weight: float = STREAM_WEIGHT
    ) -> None:
        self._tie_s = tie_s
        self._terms: tuple[Term, ...] = (
            QueueTerm(),
            PrefillTerm(),
            StallTerm(stream_weight),
            SlotsTerm(),
            AdapterTerm(adapter_load_s, stream_weight),
            DecodeTerm(stream_weight),
            PressureTerm(),
            SessionTerm(),
        )
        self._names = tuple(f"{term.name} s" for term in self._terms)

    @property
    def terms(self) -> tuple[str, ...]:
        """The cost terms, in seconds."""
        return self._names

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Lowest cost first."""
        scene = Scene(candidates, now)
        rows = list(zip(*(term.seconds(query, scene, now) for term in self._terms), strict=True))
        costs = list(map(sum, rows))
        equal = min(costs) + self._tie_s
        keys = [
            (0.0 if cost <= equal else cost, endpoint.leases, endpoint.tick, at)
            for at, (cost, endpoint) in enumerate(zip(costs, scene.endpoints, strict=True))
        ]
        keys.sort()
        return [
            Choice(scene.endpoints[at], costs[at], rows[at], candidates[at].matched_tokens)
            for _, _, _, at in keys
        ]
