"""A token bucket with burst and debt, and a budget of a calendar day.

Rules of this file:

- a bucket holds at most ``capacity`` and refills at ``rate`` a second. It admits a cost when it holds that much, or
  when it is full: a request larger than the bucket is not impossible, it only waits longest;
- it may fall below zero (a request that used more than was reserved, one larger than the bucket), and the debt is
  paid before anything else is admitted: over any time ``t`` no more than ``capacity + rate * t`` and one request pass;
- what is given back never lifts it above ``capacity``;
- a day's budget starts anew at midnight UTC; what is given back after midnight belongs to the day before.
"""

from __future__ import annotations

DAY_S = 86_400.0
_EPSILON = 1e-6
"""Sums of floats drift: a client that comes back exactly when told must be let in."""


class Bucket:
    """Times are monotonic seconds; the unit of ``level`` is the caller's (requests, tokens)."""

    __slots__ = ("at", "capacity", "level", "rate")

    def __init__(self, capacity: float, rate: float, now: float) -> None:
        self.capacity = capacity
        self.rate = rate
        self.level = capacity
        self.at = now

    def left(self, now: float) -> float:
        """The level at ``now``; below zero is debt."""
        if now <= self.at:
            return self.level
        return min(self.level + (now - self.at) * self.rate, self.capacity)

    def wait_s(self, cost: float, now: float) -> float:
        """Seconds until ``cost`` is admitted; 0 when it is now."""
        missing = min(cost, self.capacity) - self.left(now)
        return missing / self.rate if missing > _EPSILON * max(self.capacity, 1.0) else 0.0

    def add(self, amount: float, now: float) -> None:
        """Give back ``amount``; take it when it is negative."""
        self.level = min(self.left(now) + amount, self.capacity)
        self.at = max(self.at, now)

    def full_s(self, now: float) -> float:
        """Seconds until the bucket is full again."""
        return max(self.capacity - self.left(now), 0.0) / self.rate

    def resize(self, capacity: float, rate: float, now: float) -> None:
        """A reload changed the limit: what was used stays used."""
        used = self.capacity - self.left(now)
        self.capacity, self.rate = capacity, rate
        self.level, self.at = capacity - used, max(self.at, now)


class DayBudget:
    """Tokens of one calendar day. ``wall`` is Unix time in seconds."""

    __slots__ = ("day", "limit", "used")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.day = 0
        self.used = 0.0

    def left(self, wall: float) -> float:
        """What is left of today."""
        return self.limit - (self.used if self.day == day_of(wall) else 0.0)

    def wait_s(self, cost: float, wall: float) -> float:
        """0 while today has room for ``cost`` (or nothing was used and ``cost`` is larger than a day), else seconds
        to midnight."""
        if self.left(wall) >= min(cost, self.limit):
            return 0.0
        return DAY_S - wall % DAY_S

    def take(self, amount: float, wall: float) -> int:
        """Use ``amount``; returns the day it was taken from, for :meth:`give`."""
        today = day_of(wall)
        if today != self.day:
            self.day, self.used = today, 0.0
        self.used += amount
        return today

    def give(self, amount: float, day: int) -> None:
        """Give back ``amount`` (take it when it is negative) if ``day`` is still the day."""
        if day == self.day:
            self.used = max(self.used - amount, 0.0)


def day_of(wall: float) -> int:
    """Number of the UTC day."""
    return int(wall // DAY_S)
