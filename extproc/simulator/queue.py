"""The jobs that wait for an engine, in order of (priority, arrival)."""

from __future__ import annotations

import heapq

from extproc.simulator.sequence import Sequence

_Entry = tuple[int, int, Sequence]


class WaitingQueue:
    """A heap with counts. A cancelled sequence leaves the counts at once and the heap when it comes to the
    top."""

    __slots__ = ("_adapters", "_heap", "_size")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._size = 0
        self._adapters: dict[str, int] = {}

    def __len__(self) -> int:
        """Jobs that wait."""
        return self._size

    @property
    def adapters(self) -> tuple[str, ...]:
        """Adapters that jobs wait for, sorted."""
        return tuple(sorted(self._adapters))

    def push(self, seq: Sequence) -> None:
        """``seq`` waits."""
        heapq.heappush(self._heap, (seq.job.priority, seq.order, seq))
        self._size += 1
        adapter = seq.job.adapter
        if adapter is not None:
            self._adapters[adapter] = self._adapters.get(adapter, 0) + 1

    def first(self) -> Sequence | None:
        """The next in order, or None."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """The first starts."""
        self.forget(heapq.heappop(self._heap)[2])

    def pass_over(self) -> _Entry:
        """Take the first out of the order for a while; it still counts as waiting. See ``put_back``."""
        return heapq.heappop(self._heap)

    def put_back(self, entry: _Entry) -> None:
        """End of ``pass_over``."""
        heapq.heappush(self._heap, entry)

    def forget(self, seq: Sequence) -> None:
        """``seq`` waits no longer: it starts, or was cancelled."""
        self._size -= 1
        adapter = seq.job.adapter
        if adapter is not None:
            left = self._adapters[adapter] - 1
            if left:
                self._adapters[adapter] = left
            else:
                del self._adapters[adapter]
