"""Minimal health of one endpoint: consecutive failures exclude it for a growing time; it comes back gently.

Rules of this file:

- ``failures`` counts failed attempts, or refused scrapes, in a row; ``threshold`` of them exclude the endpoint until
  ``excluded_until``; the time doubles with every further exclusion up to ``max_backoff_s``;
- after the exclusion the endpoint is on probation: it may hold 1, then 2, then 4 requests, one step a success;
  a failure on probation excludes again at once; ``probation_s`` without a failure end the probation too;
- an endpoint excluded because nothing listened (``unreachable``) is taken back, on probation, as soon as it answers;
- whether the last endpoint of a pool may be excluded is not known here: the candidate filter falls open.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Health:
    """Failure row, exclusion and probation of one endpoint. Times are monotonic seconds."""

    threshold: int = 3
    base_backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    probation: int = 3
    probation_s: float = 30.0
    failures: int = 0
    exclusions: int = 0
    excluded_until: float = 0.0
    trials_left: int = 0
    """Successes still wanted before full trust; 0 outside probation."""
    unreachable: bool = False

    def failed(self, now: float, *, unreachable: bool = False) -> None:
        """Count one failure. Failures of requests already under way when it was excluded do not add up."""
        self.failures += 1
        self.unreachable = self.unreachable or unreachable
        if now < self.excluded_until:
            return
        if self.failures >= self.threshold or self._on_probation(now):
            backoff = min(self.base_backoff_s * 2**self.exclusions, self.max_backoff_s)
            self.exclusions = min(self.exclusions + 1, 16)
            self.excluded_until = now + backoff
            self.trials_left = self.probation

    def succeeded(self, now: float) -> None:
        """Count one served request; enough of them in a row end the probation and forget the back-off."""
        if now < self.excluded_until:
            return
        self.failures = 0
        if self.trials_left:
            self.trials_left -= 1
            if not self.trials_left:
                self.exclusions = 0

    def answered(self, now: float) -> None:
        """The endpoint answered a scrape: if it was only unreachable, it may be tried again now."""
        if self.unreachable:
            self.unreachable = False
            self.failures = 0
            self.excluded_until = min(self.excluded_until, now)

    def excluded(self, now: float) -> bool:
        """Whether new requests must stay away."""
        return now < self.excluded_until

    def admits(self, now: float, leases: int) -> bool:
        """Whether one more request may go here beside ``leases`` open ones."""
        if now < self.excluded_until:
            return False
        return not self._on_probation(now) or leases < 1 << (self.probation - self.trials_left)

    def _on_probation(self, now: float) -> bool:
        if self.trials_left and now >= self.excluded_until + self.probation_s:
            self.trials_left = 0
            self.exclusions = 0
        return self.trials_left > 0
