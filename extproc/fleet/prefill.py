"""How much work a prompt is: tokens, and what attention adds to long ones.

Rules of this file:

- a token costs the same in the weights wherever it stands, and in attention in proportion to the tokens before
  it. So ``n`` tokens after ``c`` cached ones are ``n * (1 + share * (c + n / 2))`` units of work, a unit being
  a token at the start of a prompt. Rates, backlogs and costs count in these units;
- ``share`` is a property of the model. By FLOPs it is ``2 * layers * heads * head size / parameters``: 2e-5 for
  70B models to 3.5e-5 for 7B ones (Llama 3, Qwen 2.5), more where kernels are slow, next to nothing for hybrid
  models. The prior is in between;
- it is learned from first tokens that waited for little else: the share under which these took the same time
  per unit of work, whatever their length. Half of the samples may be absurd (median and mean absolute
  deviation), and the scale drops out, so endpoints of any speed teach one share;
- prompts of much the same length tell nothing of it: then it stays, and the rate takes the difference. It moves in
  small steps, for rates and backlogs are in its units.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

PRIOR_SHARE = 2.5e-5

_LEAST = 1e-6
_MOST = 1e-3
_WINDOW = 96
_EVERY = 8
_STEPS = (0.7, 0.85, 1.0, 1.18, 1.43)
_PULL = 0.01
"""How much better a fit must be, in log seconds, to move the share by a factor of e from the prior."""
_APART = 4.0
"""Long prompts must be so many times as long as short ones, a tenth of each left out."""


def work(uncached: float, cached: float, share: float) -> float:
    """Units of work in prefilling so many tokens after so many cached ones."""
    return uncached * (1.0 + share * (cached + uncached / 2)) if uncached > 0.0 else 0.0


class AttentionShare:
    """Learned for one pool."""

    __slots__ = ("_new", "_samples", "share")

    def __init__(self) -> None:
        self.share = PRIOR_SHARE
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._new = 0

    def observe(self, uncached: float, cached: float, units: float) -> None:
        """A prompt took as long as so many units of work take on its endpoint."""
        if not (uncached >= 1.0 and cached >= 0.0 and 0.0 < units < math.inf):
            return
        self._samples.append((cached + uncached / 2, math.log(units / uncached)))
        self._new += 1
        if self._new >= _EVERY and len(self._samples) >= 2 * _EVERY:
            self._new = 0
            depths = sorted(depth for depth, _ in self._samples)
            tenth = len(depths) // 10
            if depths[-1 - tenth] >= _APART * depths[tenth]:
                self._fit()

    def _fit(self) -> None:
        self.share = min(
            (min(max(self.share * step, _LEAST), _MOST) for step in _STEPS),
            key=lambda share: self._misfit(share) + _PULL * abs(math.log(share / PRIOR_SHARE)),
        )

    def _misfit(self, share: float) -> float:
        off = [seen - math.log1p(share * depth) for depth, seen in self._samples]
        middle = median(off)
        return sum(abs(value - middle) for value in off) / len(off)
