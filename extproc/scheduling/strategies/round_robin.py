"""Round robin: whoever was chosen longest ago."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.scheduling.strategy import Candidate, Choice, Query


class RoundRobin:
    """Orders by the endpoints' own rotation mark, so that endpoints may come and go between two turns."""

    terms = ("turn",)

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """The endpoint chosen longest ago first; loads and caches do not matter."""
        ordered = sorted(candidates, key=lambda candidate: candidate.endpoint.tick)
        return [
            Choice(c.endpoint, float(turn), (float(turn),), c.matched_tokens)
            for turn, c in enumerate(ordered)
        ]
