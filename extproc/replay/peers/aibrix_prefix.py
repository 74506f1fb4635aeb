"""Prefix cache first, as far as the load allows.

Source: vllm-project/aibrix, pkg/plugins/gateway/algorithms/prefix_cache.go (November 2026): if running requests
differ by more than 8, those with the fewest; else the endpoints that hold a part of the prompt, highest match percent
first, equals by load: the first whose load is at most the mean plus one standard deviation; else the fewest running
requests. Ties by chance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean, pstdev

from extproc.replay.peers.in_flight import Watching
from extproc.scheduling.strategy import Candidate, Choice, Query


class AibrixPrefix(Watching):
    """Load is requests in flight as the gateway counts them."""

    terms = ("requests", "match %")

    def __init__(self, rng: random.Random, imbalance: float = 8.0, deviations: float = 1.0) -> None:
        super().__init__()
        self._rng = rng
        self._imbalance = imbalance
        self._deviations = deviations

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """The chosen one first, the others by load."""
        prompt = max(query.prompt_tokens, 1)
        rows = []
        for candidate in candidates:
            load = self.books.of(candidate.endpoint).requests
            percent = int(100 * candidate.matched_tokens / prompt)
            rows.append((load, self._rng.random(), percent, candidate))
        rows.sort(key=lambda row: row[:2])
        loads = [row[0] for row in rows]
        if loads[-1] - loads[0] <= self._imbalance:
            bound = fmean(loads) + self._deviations * pstdev(loads)
            fitting = [row for row in rows if row[2] > 0 and row[0] <= bound]
            if fitting:
                best = min(fitting, key=lambda row: (-row[2], row[0]))
                rows.remove(best)
                rows.insert(0, best)
        self.books.sent(query.request_id, rows[0][3].endpoint, 0.0, query.prompt_tokens)
        return [
            Choice(candidate.endpoint, float(place), (float(load), float(percent)), candidate.matched_tokens)
            for place, (load, _, percent, candidate) in enumerate(rows)
        ]
