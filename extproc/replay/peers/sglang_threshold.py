"""Cache-aware with a threshold and an imbalance switch.

Source: SGLang router ``cache_aware``, kept by vllm-project/router (src/policies/cache_aware.rs) with the defaults of
its command line: imbalanced if ``max - min > 64 and max > 1.5 * min`` requests, then the least loaded; else, where the
best match is above 0.3 of the prompt, its holder; else the least loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from extproc.replay.peers.in_flight import Watching
from extproc.scheduling.strategy import Candidate, Choice, Query
from extproc.scheduling.ties import ranked


class SglangThreshold(Watching):
    """Load is requests in flight as the router counts them."""

    terms = ("mode", "requests")

    def __init__(self, threshold: float = 0.3, absolute: float = 64, relative: float = 1.5) -> None:
        super().__init__()
        self._threshold = threshold
        self._absolute = absolute
        self._relative = relative

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """By match where the fleet is balanced and the match is good, else by load."""
        loads = [self.books.of(candidate.endpoint).requests for candidate in candidates]
        most, least = max(loads), min(loads)
        best = max(candidate.matched_tokens for candidate in candidates)
        balanced = most - least <= self._absolute or most <= self._relative * least
        by_match = balanced and best > self._threshold * query.prompt_tokens
        if by_match:
            costs = [float(query.prompt_tokens - candidate.matched_tokens) for candidate in candidates]
        else:
            costs = [float(load) for load in loads]
        rows = [(float(by_match), float(load)) for load in loads]
        choices = ranked(candidates, costs, rows)
        self.books.sent(query.request_id, choices[0].endpoint, 0.0, query.prompt_tokens)
        return choices
