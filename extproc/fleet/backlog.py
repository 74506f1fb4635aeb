"""Uncached prompt tokens given to one endpoint and not yet prefilled, as far as we know.

Rules of this file:

- ``add`` at the decision, ``remove`` when the lease's first token came or the lease ended before it;
- between scrapes the backlog leaks at the endpoint's prefill rate (the engine works while we do not look);
- it is never below zero and never above what open, unstarted leases can explain (``charged``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backlog:
    """Tokens waiting to be prefilled. Times are monotonic seconds, rates tokens per second."""

    charged: float = 0.0
    """Uncached tokens of leases whose first token has not come."""
    level: float = 0.0
    """Estimate of what is still to prefill, at ``at``."""
    at: float = 0.0

    def tokens(self, now: float, rate: float) -> float:
        """The level at ``now``, leaked at ``rate``."""
        leaked = max(now - self.at, 0.0) * rate
        return min(max(self.level - leaked, 0.0), self.charged)

    def add(self, tokens: float, now: float, rate: float) -> None:
        """A request with this many uncached tokens was decided for the endpoint."""
        self.level = self.tokens(now, rate) + tokens
        self.charged += tokens
        self.at = now

    def remove(self, tokens: float, now: float, rate: float) -> None:
        """A lease's first token came, or it ended without one: its tokens no longer wait."""
        self.charged = max(self.charged - tokens, 0.0)
        self.level = self.tokens(now, rate)
        self.at = now
