"""What a release is to do: values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Step:
    """A share of the clients, from 0 to 1, and the least time it is kept."""

    share: float
    hold_s: float = 0.0


@dataclass(slots=True, frozen=True)
class Guards:
    """When the candidate is worse than the baseline. None: not asked."""

    errors: float | None = 0.01
    """Error rate above the baseline's, absolute."""
    ttft: float | None = 1.2
    """p99 of the time to first token, as a multiple of the baseline's."""
    quality: float | None = None
    """Mean quality score below the baseline's, absolute."""
    alpha: float = 0.01
    """Chance of a false rollback over the whole release, all guards together."""
    min_samples: int = 100
    """Requests of the candidate in a step before the next one begins."""


@dataclass(slots=True, frozen=True)
class Plan:
    """A release of one pool: ``candidate`` takes over from ``baseline`` in ``steps``."""

    pool: str
    baseline: str
    candidate: str
    steps: tuple[Step, ...]
    guards: Guards = Guards()
    pin_header: str = ""
    """Lower-case name of the header with which testers choose a version by name; empty: none."""

    @property
    def identity(self) -> str:
        """Changes when the release must begin anew: other versions or other steps. Guards may be changed on the way."""
        steps = ",".join(f"{step.share:g}/{step.hold_s:g}" for step in self.steps)
        return f"{self.pool}:{self.baseline}->{self.candidate}:{steps}"
