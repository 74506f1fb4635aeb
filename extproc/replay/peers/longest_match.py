"""Longest match wins.

Source: vllm-project/router, ``precise_cache_aware`` and ``kv_aware`` policies (src/policies, November 2026): the
endpoint with the longest contiguous cached prefix, whatever its load; only when nobody holds anything, the one with
the fewest requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from extproc.scheduling.strategy import Candidate, Choice, Query
from extproc.scheduling.ties import ranked


class LongestMatch:
    """Cost: prompt tokens not matched."""

    terms = ("unmatched tokens",)

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Longest match first; equals by fewest requests."""
        return ranked(candidates, [float(query.prompt_tokens - c.matched_tokens) for c in candidates])
