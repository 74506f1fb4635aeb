"""How many requests of a pool may be sent again because an engine answered that it is busy.

Rules of this file:

- every request of a pool earns it ``share`` of a retry, up to ``burst`` saved ones; every retry of a busy answer (503)
  spends one. While less than one is left, requests are sent out without leave to be retried on such answers;
- retries that are under way when the budget runs out are made all the same: the budget goes below zero and the pool
  pays them back first. So over time there are at most ``1 + share`` attempts a request;
- connections that could not be made are exempt: their retries load no engine, and the more endpoints are dead the more
  they are needed. Leave for those is never withheld.

A retry budget keeps a saturated fleet from being given its load twice (the idea of Finagle's and gRPC's retry throttling).
"""

from __future__ import annotations

from collections.abc import Container


class RetryBudget:
    """Budgets by pool; pools come from the configuration."""

    def __init__(self, share: float = 0.2, burst: float = 10.0) -> None:
        self._share = share
        self._burst = burst
        self._left: dict[str, float] = {}
        self.spent_total: dict[str, int] = {}
        """Pool -> retries of busy answers."""
        self.withheld_total: dict[str, int] = {}
        """Pool -> requests sent out without leave to be retried on busy answers."""

    def rule(self, share: float, burst: float) -> None:
        """Other bounds from now on; what is saved up stays, within ``burst``."""
        self._share, self._burst = share, burst
        self._left = {pool: min(left, burst) for pool, left in self._left.items()}

    def request(self, pool: str) -> bool:
        """A request is decided for the pool; whether it may be retried on a busy answer."""
        left = min(self._left.get(pool, self._burst) + self._share, self._burst)
        self._left[pool] = left
        if left >= 1.0:
            return True
        self.withheld_total[pool] = self.withheld_total.get(pool, 0) + 1
        return False

    def spend(self, pool: str, retries: int = 1) -> None:
        """Retries of busy answers were made."""
        self._left[pool] = self._left.get(pool, self._burst) - retries
        self.spent_total[pool] = self.spent_total.get(pool, 0) + retries

    def refund(self, pool: str) -> None:
        """What was taken for the retry of a busy answer was one of a connection that could not be made."""
        if self.spent_total.get(pool):
            self.spent_total[pool] -= 1
            self._left[pool] = min(self._left.get(pool, self._burst) + 1.0, self._burst)

    def left(self, pool: str) -> float:
        """Retries saved up; below zero they are owed."""
        return self._left.get(pool, self._burst)

    def forget(self, pools: Container[str]) -> None:
        """Drop pools that are gone."""
        for table in (self._left, self.spent_total, self.withheld_total):
            for pool in [pool for pool in table if pool not in pools]:
                del table[pool]
