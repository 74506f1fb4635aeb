"""A pool's circuit: when its engines fail together, clients hear so at once instead of waiting for it.

Rules of this file:

    state   | event                                                        | next
    --------+--------------------------------------------------------------+-----------------------------
    closed  | of at least 20 endings in 30 s more than ``error_rate`` failed| open for 5 s
    closed  | the last 20 endings were all busy (503, 529, 429)            | open for 1 s
    open    | a request comes                                              | refused: 503 and Retry-After
    open    | the time is over                                             | probing, 3 requests may pass
    probing | a request comes and a probe is left                          | it passes
    probing | a success                                                    | closed, everything forgotten
    probing | a failure or busy                                            | open, for twice as long (60 s at most)
    probing | 5 s without a result                                         | probing, 3 new probes

Neutral endings (a client that left, its own mistakes) count neither way.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
LEAST = 20
PROBES = 3
_OPEN_S = 5.0
_BUSY_S = 1.0
_MOST_S = 60.0


class Circuit:
    """One pool's. ``error_rate`` None: never opens for failures."""

    __slots__ = ("_busy", "_endings", "_failed", "_next_s", "_probes", "_probing_until", "_until")

    def __init__(self) -> None:
        self._endings: deque[tuple[float, bool]] = deque(maxlen=2000)
        self._failed = 0
        self._busy = 0
        self._until: float | None = None
        self._next_s = _OPEN_S
        self._probes = 0
        self._probing_until = 0.0

    def is_open(self, now: float) -> bool:
        """Whether requests are refused now; it changes nothing."""
        if self._until is None:
            return False
        return now < self._until or (self._probes <= 0 and now < self._probing_until)

    def admits(self, now: float) -> float:
        """0 when a request may pass (as a probe, perhaps), else seconds until it is worth coming again."""
        if self._until is None:
            return 0.0
        if now < self._until:
            return self._until - now
        if now >= self._probing_until:
            self._probes = PROBES
            self._probing_until = now + _OPEN_S
        if self._probes <= 0:
            return self._probing_until - now
        self._probes -= 1
        return 0.0

    def ended(self, *, failed: bool, busy: bool, error_rate: float | None, now: float) -> None:
        """A request ended at an engine: it failed, or the engine was too busy, or it was served."""
        if self._until is not None:
            if now >= self._until:
                if failed or busy:
                    self._open(now, self._next_s)
                else:
                    self._close()
            return
        if error_rate is None and not busy:
            self._busy = 0
            return
        self._busy = self._busy + 1 if busy else 0
        if busy:
            if self._busy >= LEAST:
                self._open(now, _BUSY_S)
            return
        if len(self._endings) == self._endings.maxlen:
            self._failed -= self._endings.popleft()[1]
        self._endings.append((now, failed))
        self._failed += failed
        while self._endings and self._endings[0][0] < now - WINDOW_S:
            self._failed -= self._endings.popleft()[1]
        if (
            error_rate is not None
            and len(self._endings) >= LEAST
            and self._failed > error_rate * len(self._endings)
        ):
            self._open(now, self._next_s)

    def _open(self, now: float, seconds: float) -> None:
        self._until = now + seconds
        self._next_s = min(max(seconds, _OPEN_S) * 2, _MOST_S)
        self._probes = 0
        self._probing_until = 0.0
        self._forget()

    def _close(self) -> None:
        self._until = None
        self._next_s = _OPEN_S
        self._forget()

    def _forget(self) -> None:
        self._endings.clear()
        self._failed = 0
        self._busy = 0
