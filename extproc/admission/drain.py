"""How fast a queue moves: tokens dispatched per second while something waited.

Only time in which requests waited counts, so an idle hour says nothing. Old seconds fade. A queue that slows down shows
a falling rate; one that stands still for long shows none, because how long a generation takes that holds the last place
is not known.
"""

from __future__ import annotations

import math

_MEMORY_S = 20.0
_BELIEVED_S = 0.5
_BELIEVED = 2.0


class DrainRate:
    """Times are monotonic seconds."""

    __slots__ = ("_at", "_count", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._count = 0.0
        self._at: float | None = None

    def waiting(self, now: float) -> None:
        """Something waits from now on."""
        if self._at is None:
            self._at = now

    def idle(self, now: float) -> None:
        """Nothing waits any more."""
        self._pass(now)
        self._at = None

    def dispatched(self, tokens: float, now: float) -> None:
        """A waiting request of so many tokens was sent."""
        self._pass(now)
        self._tokens += tokens
        self._count += 1.0

    def rate(self, now: float) -> float | None:
        """Tokens per second; None before enough has been seen."""
        self._pass(now)
        if self._seconds < _BELIEVED_S or self._count < _BELIEVED:
            return None
        return self._tokens / self._seconds

    def _pass(self, now: float) -> None:
        if self._at is None or now <= self._at:
            return
        elapsed = now - self._at
        keep = math.exp(-elapsed / _MEMORY_S)
        self._tokens *= keep
        self._count *= keep
        self._seconds = self._seconds * keep + _MEMORY_S * (1.0 - keep)
        self._at = now
