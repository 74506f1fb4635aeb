"""Windows of the week in which other rules hold."""

from __future__ import annotations

from dataclasses import dataclass

DAY = 1440


@dataclass(slots=True, frozen=True)
class Window:
    """Opens on ``days`` (0 is Monday) at minute ``begin`` and closes at ``end``; an end that is not after the begin
    is on the next day."""

    days: frozenset[int]
    begin: int
    end: int

    def holds(self, weekday: int, minute: int) -> bool:
        """Whether the window is open at this minute of local time."""
        if self.begin < self.end:
            return weekday in self.days and self.begin <= minute < self.end
        return (weekday in self.days and minute >= self.begin) or (
            (weekday - 1) % 7 in self.days and minute < self.end
        )
