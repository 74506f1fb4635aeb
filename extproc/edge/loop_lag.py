"""How late the event loop wakes up: the one number that shows that something holds it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable


class LoopLag:
    """``await run()`` until cancelled. ``worst`` is the longest delay of the last ten seconds, in seconds."""

    def __init__(
        self, on_lag: Callable[[float, float], None] = lambda seconds, worst: None, every_s: float = 0.1
    ) -> None:
        self.worst = 0.0
        self.smoothed = 0.0
        """Mean lag of the last half second or so: whether the loop is late now, not whether it once was."""
        self._on_lag = on_lag
        self._every_s = every_s
        self._recent: deque[float] = deque(maxlen=max(int(10.0 / every_s), 1))

    async def run(self) -> None:
        """Sleep, and measure how much longer it took."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._every_s)
            self.saw(max(time.monotonic() - before - self._every_s, 0.0))

    def saw(self, lag: float) -> None:
        """Count one delay in seconds."""
        self._recent.append(lag)
        self.worst = max(self._recent)
        self.smoothed += (lag - self.smoothed) * 0.3
        self._on_lag(lag, self.worst)
