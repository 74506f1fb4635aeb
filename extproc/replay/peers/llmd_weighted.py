"""The weighted blend of three scores.

Source: Gateway API Inference Extension and llm-d-router, the configuration shipped before August 2026: queue-scorer
(weight 2), kv-cache-utilization-scorer (2), prefix-cache-scorer (3), max-score-picker. Scores: queue min-max over the
candidates; ``1 - kv usage``; matched over total prompt blocks. Scraped values are used whatever their age, a value
never scraped counts as zero; ties by chance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from extproc.scheduling.strategy import Candidate, Choice, Query


class LlmdWeighted:
    """Cost: weights less the weighted sum of the scores."""

    terms = ("queue", "kv", "prefix")

    def __init__(self, rng: random.Random, queue: float = 2.0, kv: float = 2.0, prefix: float = 3.0) -> None:
        self._rng = rng
        self._weights = (queue, kv, prefix)

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Highest score first."""
        states = [candidate.endpoint.state for candidate in candidates]
        queues = [(state.waiting or 0.0) if state else 0.0 for state in states]
        most, least = max(queues), min(queues)
        spread = most - least
        queue, kv, prefix = self._weights
        prompt = max(query.prompt_tokens, 1)
        choices = []
        for candidate, state, waiting in zip(candidates, states, queues, strict=True):
            row = (
                (most - waiting) / spread if spread else 1.0,
                1.0 - ((state.kv_usage or 0.0) if state else 0.0),
                candidate.matched_tokens / prompt,
            )
            score = queue * row[0] + kv * row[1] + prefix * row[2]
            choices.append(
                Choice(candidate.endpoint, queue + kv + prefix - score, row, candidate.matched_tokens)
            )
        self._rng.shuffle(choices)
        choices.sort(key=lambda choice: choice.cost)
        return choices
