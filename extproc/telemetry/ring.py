"""The newest decision records, found by request id.

Rules of this file: a fixed number of places written round and round; records whose request still runs are
also kept aside until it is settled, so that a long stream's record gets its outcome even if the ring has
moved on. Both are bounded.
"""

from __future__ import annotations

from collections import OrderedDict

from extproc.ledger import Settlement
from extproc.telemetry.decision import DecisionRecord


class DecisionRing:
    """``capacity`` records; 0 keeps only those of running requests, at most ``max_running``."""

    def __init__(self, capacity: int, max_running: int = 50_000) -> None:
        self.capacity = capacity
        self.total = 0
        self._places: list[DecisionRecord | None] = [None] * capacity
        self._by_id: dict[str, DecisionRecord] = {}
        self._running: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._max_running = max_running

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def running(self) -> int:
        """Records whose request has not been settled."""
        return len(self._running)

    def add(self, record: DecisionRecord) -> None:
        """Keep a record; the oldest makes room. A record without rejection waits for :meth:`settle`."""
        if self.capacity:
            place = self.total % self.capacity
            oldest = self._places[place]
            if oldest is not None and self._by_id.get(oldest.id) is oldest:
                del self._by_id[oldest.id]
            self._places[place] = record
            self._by_id[record.id] = record
        self.total += 1
        if record.rejection is None:
            self._running[record.id] = record
            if len(self._running) > self._max_running:
                self._running.popitem(last=False)

    def settle(self, settlement: Settlement) -> DecisionRecord | None:
        """The request ended: complete its record and return it; None when it is not known (adopted, or too
        old).
        """
        record = self._running.pop(settlement.lease.id, None)
        if record is not None:
            record.settled(settlement)
        return record

    def find(self, request_id: str) -> DecisionRecord | None:
        """The record of a request, running or among the newest."""
        return self._by_id.get(request_id) or self._running.get(request_id)

    def newest(self, count: int) -> list[DecisionRecord]:
        """Up to ``count`` records, newest first."""
        wanted = min(count, self.capacity, self.total)
        found = (self._places[(self.total - 1 - back) % self.capacity] for back in range(wanted))
        return [record for record in found if record is not None]
