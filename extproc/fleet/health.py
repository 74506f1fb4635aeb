"""Minimal health of one endpoint: consecutive failures exclude it for a growing time; it comes back gently.

Rules of this file:

- ``failures`` counts failed attempts and failed scrapes in a row; ``threshold`` of them exclude the endpoint until
  ``excluded_until``, which doubles with every further exclusion up to ``max_backoff_s``;
- after the exclusion the endpoint is on probation: one request at a time until ``probation`` successes;
- a success at any time clears the row; it shortens no exclusion that scrapes or attempts still renew;
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
    failures: int = 0
    exclusions: int = 0
    excluded_until: float = 0.0
    trials_left: int = 0
    """Successes still wanted before full trust; 0 outside probation."""

    def failed(self, now: float) -> None:
        """Count one failure; on probation a single one excludes again."""
        self.failures += 1
        if now < self.excluded_until:
            return
        if self.failures >= self.threshold or self.trials_left:
            backoff = min(self.base_backoff_s * 2**self.exclusions, self.max_backoff_s)
            self.exclusions = min(self.exclusions + 1, 16)
            self.excluded_until = now + backoff
            self.trials_left = self.probation

    def succeeded(self, now: float) -> None:
        """Count one success; enough of them in a row end the probation and forget the back-off."""
        self.failures = 0
        if now >= self.excluded_until and self.trials_left:
            self.trials_left -= 1
            if not self.trials_left:
                self.exclusions = 0

    def excluded(self, now: float) -> bool:
        """Whether new requests must stay away."""
        return now < self.excluded_until

    def admits(self, now: float, leases: int) -> bool:
        """Whether one more request may go here: not excluded, and on probation one at a time."""
        if now < self.excluded_until:
            return False
        return not self.trials_left or leases == 0
