"""Is the mean of one arm higher than the other's by more than a margin? Asked again and again while data comes in.

Rules of this file:

- only what was seen in the same stretch of time is compared: within each stretch the difference of the two means is taken,
  weighted with w = n_c n_b / (n_c + n_b) (the weights of Mantel and Haenszel): S = sum of w (mean_c - mean_b - margin).
  An incident that hits both arms does not move it, nor does a share that grows while the load does;
- the variance of S is V = sum of w^2 (var_c / n_c + var_b / n_b), with each arm's variance over all it has shown so far, no
  smaller than ``floor`` (for rare events: that of a rate at the margin, since few samples show no event at all);
- the question may be asked at any time without spending more than ``alpha``: S is compared with the boundary of the normal
  mixture, sqrt((V + r) log((V + r) / (r a^2))) with a = 2 alpha (one side of the two-sided boundary). Robbins, "Statistical
  methods related to the law of the iterated logarithm", 1970; in this form Howard, Ramdas, McAuliffe, Sekhon, "Time-uniform,
  nonparametric, nonasymptotic confidence sequences", Annals of Statistics 49 (2021), equation 14, which also gives the r
  that makes it tightest at a V of one's choice. With variances estimated it holds for growing samples: Waudby-Smith, Arbour,
  Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", Annals of Statistics 52
  (2024). ``loadtest/canary.py`` measures what that is worth at our sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LEAST = 30
"""Samples of each arm below which nothing is said."""


@dataclass(slots=True)
class Sums:
    """Count, sum and sum of squares."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """One observation."""
        self.n += 1
        self.total += value
        self.squares += value * value

    def merge(self, other: Sums) -> None:
        """All observations of another."""
        self.n += other.n
        self.total += other.total
        self.squares += other.squares

    @property
    def mean(self) -> float:
        """Mean; 0 without observations."""
        return self.total / self.n if self.n else 0.0

    @property
    def variance(self) -> float:
        """Variance around the mean."""
        return max(self.squares / self.n - self.mean**2, 0.0) if self.n else 0.0


@dataclass(slots=True)
class Contrast:
    """Candidate against baseline; larger values are worse. ``tuned_for``: weight (about: samples of the smaller arm) at
    which it is to be sharpest."""

    margin: float
    alpha: float
    floor: float = 0.0
    tuned_for: float = 1000.0
    candidate: Sums = field(default_factory=Sums)
    baseline: Sums = field(default_factory=Sums)
    _c: Sums = field(default_factory=Sums)
    _b: Sums = field(default_factory=Sums)
    _weight: float = 0.0
    _score: float = 0.0
    _variance: float = 0.0

    def add(self, *, candidate: bool, value: float) -> None:
        """One observation of the running stretch."""
        (self._c if candidate else self._b).add(value)

    def close(self) -> None:
        """The stretch of time ends; one in which an arm saw nothing goes on."""
        c, b = self._c, self._b
        if not (c.n and b.n):
            return
        self.candidate.merge(c)
        self.baseline.merge(b)
        weight = c.n * b.n / (c.n + b.n)
        variances = max(self.candidate.variance, self.floor), max(self.baseline.variance, self.floor)
        self._weight += weight
        self._score += weight * (c.mean - b.mean - self.margin)
        self._variance += weight**2 * (variances[0] / c.n + variances[1] / b.n)
        self._c, self._b = Sums(), Sums()

    @property
    def difference(self) -> float:
        """Candidate's mean minus the baseline's, at the same times."""
        return self._score / self._weight + self.margin if self._weight else 0.0

    @property
    def exceeded(self) -> bool:
        """Whether the candidate is worse by more than the margin."""
        enough = min(self.candidate.n, self.baseline.n) >= LEAST
        return enough and self._variance > 0.0 and self._score > self.boundary()

    def boundary(self) -> float:
        """What S must exceed."""
        a = min(2 * self.alpha, 1.0)
        spread = self._variance / self._weight
        best = 2 * math.log(1 / a) + math.log(1 + 2 * math.log(1 / a))
        r = self.tuned_for * spread / best
        return math.sqrt((self._variance + r) * math.log((self._variance + r) / (r * a * a)))

    def dump(self) -> dict[str, object]:
        """What must survive a restart; the running stretch is lost."""
        return {
            "candidate": asdict(self.candidate),
            "baseline": asdict(self.baseline),
            "sums": [self._weight, self._score, self._variance],
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`dump` gave. Raises KeyError, TypeError or ValueError for anything else."""
        candidate, baseline = Sums(**saved["candidate"]), Sums(**saved["baseline"])
        weight, score, variance = (float(number) for number in saved["sums"])
        self.candidate, self.baseline = candidate, baseline
        self._weight, self._score, self._variance = weight, score, variance
