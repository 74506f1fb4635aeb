"""Successes and failures of one endpoint over the last minutes, in constant memory.

A window is a ring of parts; a part is cleared when its time comes round again, so what is counted is between
``seconds`` less one part and ``seconds`` old. Neutral outcomes are never counted.
"""

from __future__ import annotations

_PARTS = 12
_NEVER = -(1 << 60)


class FailureWindow:
    """Counts of the last ``seconds``."""

    __slots__ = ("_done", "_failed", "_numbers", "_part_s")

    def __init__(self, seconds: float) -> None:
        self._part_s = seconds / _PARTS
        self._numbers = [_NEVER] * _PARTS
        self._done = [0] * _PARTS
        self._failed = [0] * _PARTS

    def add(self, now: float, *, failed: bool) -> None:
        """Count one outcome."""
        number = int(now // self._part_s)
        place = number % _PARTS
        if self._numbers[place] != number:
            self._numbers[place] = number
            self._done[place] = self._failed[place] = 0
        if failed:
            self._failed[place] += 1
        else:
            self._done[place] += 1

    def counts(self, now: float) -> tuple[int, int]:
        """``(failures, outcomes)`` of the window."""
        oldest = int(now // self._part_s) - _PARTS
        failed = done = 0
        for place, number in enumerate(self._numbers):
            if number > oldest:
                failed += self._failed[place]
                done += self._done[place]
        return failed, failed + done

    def clear(self) -> None:
        """Forget everything."""
        self._numbers = [_NEVER] * _PARTS
