"""A run of equal engine steps and its time in closed form.

With n sequences decoding over K tokens, step j (from 0) takes first + j * slope seconds, where slope is
what the n tokens added by each step cost the next one. So k steps take k * first + slope * k * (k - 1) / 2,
and the steps done by a time follow from a quadratic equation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from extproc.simulator.sequence import Sequence


@dataclass(slots=True)
class Run:
    """Steps in progress. A step with prefill chunks is always a run of its own."""

    start: float
    steps: int
    first_s: float
    slope_s: float
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def end(self) -> float:
        """When the last step ends."""
        return self.start + self.seconds(self.steps)

    def seconds(self, steps: int) -> float:
        """Time that the first ``steps`` steps take."""
        return steps * self.first_s + self.slope_s * steps * (steps - 1) / 2

    def done_by(self, now: float) -> int:
        """Whole steps done at ``now``."""
        elapsed = now - self.start
        if elapsed >= self.seconds(self.steps):
            return self.steps
        if elapsed <= 0:
            return 0
        half = self.slope_s / 2
        linear = self.first_s - half
        if half:
            guess = int(2 * elapsed / (linear + math.sqrt(linear * linear + 4 * half * elapsed)))
        else:
            guess = int(elapsed / linear)
        done = min(max(guess, 0), self.steps)
        while done < self.steps and self.seconds(done + 1) <= elapsed:
            done += 1
        while done and self.seconds(done) > elapsed:
            done -= 1
        return done

    def stop_after_current(self, now: float) -> None:
        """Let the run end with the step that is in progress at ``now``."""
        done = self.done_by(now)
        if done < self.steps and self.seconds(done) < now - self.start:
            done += 1
        self.steps = min(max(done, 1), self.steps)
