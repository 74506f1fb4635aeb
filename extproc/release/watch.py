"""What is seen of both versions while a release runs, and which guard it breaks.

Rules of this file:

- failures and successes count as the outcome table has it; a request that was rescued by a retry counts as a failure of the
  version that failed it; neutral endings (client gone, busy, 4xx) count for nothing;
- ``alpha`` is shared equally by the guards that are asked;
- a stretch of time, within which both versions are compared, lasts ``STRETCH_S``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from extproc.release.contrast import Contrast
from extproc.release.plan import Guards
from extproc.release.slowness import Slowness

STRETCH_S = 10.0


@dataclass(slots=True, frozen=True)
class Breach:
    """A guard that is broken."""

    guard: str
    """errors, ttft or quality."""
    text: str


class Watch:
    """The evidence of one release."""

    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        asked = [limit for limit in (guards.errors, guards.ttft, guards.quality) if limit is not None]
        alpha = guards.alpha / max(len(asked), 1)
        errors = guards.errors if guards.errors is not None else 0.0
        self.errors = Contrast(errors, alpha, floor=max(errors, 0.001) * (1 - errors))
        self.ttft = Slowness(guards.ttft if guards.ttft is not None else 1.0, alpha)
        self.quality = Contrast(guards.quality if guards.quality is not None else 0.0, alpha, tuned_for=100.0)
        self.seen = {True: 0, False: 0}
        """Requests judged: of the candidate (True), of the baseline."""
        self._closed_at: float | None = None

    def request(self, *, candidate: bool, failed: bool, ttft_s: float | None) -> None:
        """A request ended; ``ttft_s`` of streamed replies that succeeded."""
        self.seen[candidate] += 1
        self.errors.add(candidate=candidate, value=float(failed))
        if ttft_s is not None:
            self.ttft.add(candidate=candidate, ttft_s=ttft_s)

    def score(self, *, candidate: bool, value: float) -> None:
        """A quality score was given; higher is better."""
        self.quality.add(candidate=candidate, value=-value)

    def tick(self, now: float) -> Breach | None:
        """Close the stretch when its time has come, and judge."""
        if self._closed_at is None:
            self._closed_at = now
        if now - self._closed_at < STRETCH_S:
            return None
        self._closed_at = now
        for contrast in (self.errors, self.ttft, self.quality):
            contrast.close()
        return self.breach()

    def breach(self) -> Breach | None:
        """The first guard that is broken by now."""
        guards = self.guards
        if guards.errors is not None and self.errors.exceeded:
            c, b = self.errors.candidate.mean, self.errors.baseline.mean
            return Breach("errors", f"error rate {c:.2%}, baseline {b:.2%}, allowed +{guards.errors:.2%}")
        if guards.ttft is not None and self.ttft.contrast.exceeded:
            c, b = self.ttft.contrast.candidate.mean, self.ttft.contrast.baseline.mean
            return Breach(
                "ttft",
                f"TTFT above {guards.ttft:g} x the baseline's p99 in {c:.2%} of requests, "
                f"where the baseline is above its own in {b:.2%}",
            )
        if guards.quality is not None and self.quality.exceeded:
            c, b = -self.quality.candidate.mean, -self.quality.baseline.mean
            return Breach("quality", f"mean score {c:.4g}, baseline {b:.4g}, allowed -{guards.quality:g}")
        return None

    def report(self) -> dict[str, object]:
        """For people: what was compared at the same time."""
        slow = self.ttft.contrast
        return {
            "requests": {"candidate": self.seen[True], "baseline": self.seen[False]},
            "error_rate": {"candidate": self.errors.candidate.mean, "baseline": self.errors.baseline.mean},
            "slow_share": {"candidate": slow.candidate.mean, "baseline": slow.baseline.mean},
            "score": {
                "candidate": -self.quality.candidate.mean if self.quality.candidate.n else None,
                "baseline": -self.quality.baseline.mean if self.quality.baseline.n else None,
            },
        }

    def dump(self) -> dict[str, object]:
        """What must survive a restart."""
        return {
            "seen": [self.seen[True], self.seen[False]],
            "errors": self.errors.dump(),
            "ttft": self.ttft.contrast.dump(),
            "quality": self.quality.dump(),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`dump` gave. Raises KeyError, TypeError or ValueError for anything else."""
        candidate, baseline = saved["seen"]
        self.seen = {True: int(candidate), False: int(baseline)}
        for name, contrast in (
            ("errors", self.errors),
            ("ttft", self.ttft.contrast),
            ("quality", self.quality),
        ):
            contrast.load(saved[name])
