"""Token-aware routing.

Source: llm-d-router, the default since August 2026: prefix-cache-affinity-filter and token-load-scorer. Endpoints
that hold at least 0.8 of the prompt are sticky and go first, unless the best of them would start more than 18 s later
than the best other one (uncached tokens in flight over 15,928 tokens/s). Among the eligible, the lowest
``uncached tokens in flight + uncached tokens of the request`` wins; tokens count from the decision to the first
response chunk. Ties by chance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from extproc.replay.peers.in_flight import Watching
from extproc.scheduling.strategy import Candidate, Choice, Query


class LlmdTokenAware(Watching):
    """Cost: tokens to prefill before the first token, the request's own included."""

    terms = ("tokens in flight", "own uncached")

    def __init__(
        self,
        rng: random.Random,
        affinity: float = 0.8,
        penalty_s: float = 18.0,
        peak_tokens_per_s: float = 15_928.0,
    ) -> None:
        super().__init__()
        self._rng = rng
        self._affinity = affinity
        self._penalty = penalty_s * peak_tokens_per_s

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """The sticky ones first where stickiness holds; inside a group by tokens."""
        prompt = query.prompt_tokens
        loads = [self.books.of(candidate.endpoint).prefill_tokens for candidate in candidates]
        sticky = [candidate.matched_tokens >= self._affinity * prompt for candidate in candidates]
        if any(sticky) and not all(sticky):
            held = min(load for load, holds in zip(loads, sticky, strict=True) if holds)
            other = min(load for load, holds in zip(loads, sticky, strict=True) if not holds)
            if held - other > self._penalty:
                sticky = [True] * len(sticky)
        elif not any(sticky):
            sticky = [True] * len(sticky)
        rows = []
        for candidate, load, holds in zip(candidates, loads, sticky, strict=True):
            own = float(prompt - candidate.matched_tokens)
            choice = Choice(candidate.endpoint, load + own, (load, own), candidate.matched_tokens)
            rows.append((not holds, choice.cost, self._rng.random(), choice))
        rows.sort(key=lambda row: row[:3])
        best = rows[0][3]
        self.books.sent(query.request_id, best.endpoint, best.terms[1], prompt)
        return [row[3] for row in rows]
