"""The ranks of all endpoints that publish KV events, by slot.

Rules of this file: an endpoint is exact when all its ranks are; its block size is that of its first rank that
has told one. An endpoint whose ranks have told no block yet is not asked: what we sent it is the better guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from extproc.kvcache.precise import PreciseIndex
from extproc.kvcache.rank import Rank, RankCounts


class Ranks:
    """Rank by slot and number."""

    def __init__(self, index: PreciseIndex) -> None:
        self.counts = RankCounts()
        self._index = index
        self._of_slot: dict[int, dict[int, Rank]] = {}

    def __len__(self) -> int:
        return len(self._of_slot)

    def __iter__(self) -> Iterator[tuple[int, int, Rank]]:
        for slot, ranks in self._of_slot.items():
            for number, rank in ranks.items():
                yield slot, number, rank

    def add(self, slot: int, number: int, *, can_replay: bool) -> Rank:
        """A new rank; one of the same number is closed."""
        ranks = self._of_slot.setdefault(slot, {})
        if (before := ranks.get(number)) is not None:
            before.close()
        rank = ranks[number] = Rank(self._index, slot, self.counts, can_replay=can_replay)
        return rank

    def remove(self, slot: int, number: int | None = None) -> None:
        """One rank of a slot is gone, or all."""
        ranks = self._of_slot.get(slot, {})
        for one in [number] if number is not None else list(ranks):
            if (rank := ranks.pop(one, None)) is not None:
                rank.close()
        if not ranks:
            self._of_slot.pop(slot, None)

    def of(self, slot: int) -> Mapping[int, Rank]:
        """Ranks of one slot by number."""
        return self._of_slot.get(slot, {})

    def restarted(self, slot: int) -> None:
        """The engine's metrics say that it restarted."""
        for rank in self.of(slot).values():
            rank.restarted()

    def taken(self, slot: int) -> int:
        """Messages taken from the slot's ranks."""
        return sum(rank.taken for rank in self.of(slot).values())

    def exact(self, slot: int) -> bool:
        """Whether what the events say is all that the endpoint holds."""
        ranks = self.of(slot)
        return bool(ranks) and all(rank.exact for rank in ranks.values())

    def block_size(self, slot: int) -> int | None:
        """Tokens in a block; None for endpoints without events, or before the first."""
        for rank in self.of(slot).values():
            if (size := rank.block_size) is not None:
                return size
        return None

    def by_size(self) -> dict[int, dict[int, bool]]:
        """Block size -> slot -> whether it is exact."""
        found: dict[int, dict[int, bool]] = {}
        for slot, ranks in self._of_slot.items():
            size = None
            exact = True
            for rank in ranks.values():
                size = size or rank.block_size
                exact = exact and rank.exact
            if size is not None:
                found.setdefault(size, {})[slot] = exact
        return found
