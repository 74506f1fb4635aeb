"""How an endpoint did in the last minute and the last five: TTFT, durations, success, tokens. Constant
memory.

Rules of this file: a window is a ring of parts; a part is cleared when its time comes round again. Durations
are counted in bins a third of an octave wide, so a quantile is right to about 12 %. Neutral outcomes (the
client's doing) are counted, but neither for nor against an endpoint.
"""

from __future__ import annotations

import math
from array import array

from extproc.outcome import Outcome

_BINS = 64
_SMALLEST = 0.001
_PER_OCTAVE = 3


class _Part:
    __slots__ = ("bins", "done", "failed", "neutral", "number", "tokens", "ttft_count", "ttft_sum")

    def __init__(self) -> None:
        self.number = -1
        self.bins = array("I", bytes(4 * _BINS))
        self.clear(-1)

    def clear(self, number: int) -> None:
        self.number = number
        self.done = 0
        self.failed = 0
        self.neutral = 0
        self.tokens = 0
        self.ttft_count = 0
        self.ttft_sum = 0.0
        self.bins = array("I", bytes(4 * _BINS))


class Window:
    """The last ``parts * part_s`` seconds."""

    __slots__ = ("_part_s", "_parts")

    def __init__(self, parts: int, part_s: float) -> None:
        self._part_s = part_s
        self._parts = [_Part() for _ in range(parts)]

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self._part_s * len(self._parts)

    def record(
        self, ttft_s: float | None, duration_s: float, output_tokens: int | None, outcome: Outcome, now: float
    ) -> None:
        """Count one ended request."""
        self.count(ttft_s, _bin(duration_s), output_tokens, outcome, now)

    def count(
        self, ttft_s: float | None, position: int, output_tokens: int | None, outcome: Outcome, now: float
    ) -> None:
        """As :meth:`record`, with the bin of the duration."""
        number = int(now // self._part_s)
        part = self._parts[number % len(self._parts)]
        if part.number != number:
            part.clear(number)
        if outcome is Outcome.NEUTRAL:
            part.neutral += 1
            return
        if outcome is Outcome.FAILURE:
            part.failed += 1
            return
        part.done += 1
        part.bins[position] += 1
        part.tokens += output_tokens or 0
        if ttft_s is not None:
            part.ttft_count += 1
            part.ttft_sum += ttft_s

    def ttft_s(self, now: float) -> float | None:
        """Mean TTFT of streamed requests; None without any."""
        parts = self._live(now)
        count = sum(part.ttft_count for part in parts)
        return sum(part.ttft_sum for part in parts) / count if count else None

    def success(self, now: float) -> float | None:
        """Share of successes among successes and failures; None without either."""
        parts = self._live(now)
        done, failed = sum(part.done for part in parts), sum(part.failed for part in parts)
        return done / (done + failed) if done + failed else None

    def ended(self, now: float) -> int:
        """Requests that ended in whatever way: successes, failures, 4xx answers, clients that left."""
        return sum(part.done + part.failed + part.neutral for part in self._live(now))

    def duration_s(self, quantile: float, now: float) -> float | None:
        """Quantile of the durations of successes; None without any."""
        parts = self._live(now)
        left = quantile * sum(part.done for part in parts)
        if not any(part.done for part in parts):
            return None
        for position in range(_BINS):
            left -= sum(part.bins[position] for part in parts)
            if left <= 0:
                return _SMALLEST * 2 ** ((position + 0.5) / _PER_OCTAVE)
        return _SMALLEST * 2 ** (_BINS / _PER_OCTAVE)

    def tokens_per_s(self, now: float) -> float | None:
        """Output tokens of ended requests per second of the window; None when nothing ended."""
        parts = self._live(now)
        if not any(part.done for part in parts):
            return None
        return sum(part.tokens for part in parts) / self.seconds

    def _live(self, now: float) -> list[_Part]:
        oldest = int(now // self._part_s) - len(self._parts)
        return [part for part in self._parts if part.number > oldest]


class Stats:
    """One endpoint's windows: ``minute`` (6 parts) and ``five_minutes`` (5 parts)."""

    __slots__ = ("five_minutes", "minute")

    def __init__(self) -> None:
        self.minute = Window(6, 10.0)
        self.five_minutes = Window(5, 60.0)

    def record(
        self, ttft_s: float | None, duration_s: float, output_tokens: int | None, outcome: Outcome, now: float
    ) -> None:
        """Count one ended request. ``ttft_s`` is None for replies that were not streamed: their first byte is
        late."""
        position = _bin(duration_s)
        self.minute.count(ttft_s, position, output_tokens, outcome, now)
        self.five_minutes.count(ttft_s, position, output_tokens, outcome, now)


def _bin(duration_s: float) -> int:
    if not duration_s > _SMALLEST:
        return 0
    return min(int(math.log2(duration_s / _SMALLEST) * _PER_OCTAVE), _BINS - 1)
