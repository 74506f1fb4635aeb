"""What sequences hold of the KV memory, and the KV events that follow from it."""

from __future__ import annotations

from extproc.simulator.blocks import BlockCache
from extproc.simulator.events import BlocksRemoved, BlocksStored, Cleared, Event
from extproc.simulator.profile import Profile
from extproc.simulator.sequence import Sequence


class KvMemory:
    """The block cache of an engine, in terms of its sequences. KV events go to ``sink`` unless it is None."""

    __slots__ = ("_profile", "_sink", "cache")

    def __init__(self, profile: Profile, sink: list[Event] | None) -> None:
        self.cache = BlockCache(profile.kv_blocks)
        self._profile = profile
        self._sink = sink

    def reserve(self, seq: Sequence, spare: int) -> bool:
        """Hold the blocks of the whole prompt, found or new; False when ``spare`` others would not remain
        free."""
        size = self._profile.block_size
        target = seq.job.prompt_tokens + seq.generated
        names = seq.job.block_hashes
        found, idle = self.cache.match(names, (target - 1) // size)
        new = self._profile.blocks_for(target) - found
        if new + idle + spare > self.cache.free:
            return False
        seq.names = list(names[:found])
        self.cache.pin(seq.names)
        self.cache.take(new)
        seq.target = target
        seq.computed = found * size
        seq.offered = found
        return True

    def offer(self, seq: Sequence, tokens: int, at: float) -> None:
        """The first ``tokens`` tokens are (about to be) written: their full blocks enter the prefix cache."""
        hashes = seq.job.block_hashes
        first = seq.offered
        end = min(tokens // self._profile.block_size, len(hashes))
        if end <= first:
            return
        seq.offered = end
        fresh = self.cache.name(hashes[first:end])
        seq.names.extend(fresh)
        if self._sink is not None and fresh:
            self.report_evictions(at)
            self._report_stored(self._sink, seq, first, end, set(fresh), at)

    def release(self, seq: Sequence, held_tokens: int, at: float) -> None:
        """``seq`` leaves: it has room for ``held_tokens`` tokens, of which ``seq.computed`` are written and
        stay cached."""
        self.offer(seq, seq.computed, at)
        private = self._profile.blocks_for(held_tokens) - len(seq.names)
        full = seq.computed // self._profile.block_size
        self.cache.give_back(seq.names, private, max(0, full - seq.offered))
        seq.names = []
        seq.offered = 0

    def clear(self, at: float) -> None:
        """Drop the prefix cache; nothing runs."""
        self.cache.clear()
        if self._sink is not None:
            self._sink.append(Cleared(at))

    def report_evictions(self, at: float) -> None:
        """Turn the cache's list of evicted blocks into an event."""
        if self.cache.evicted:
            if self._sink is not None:
                self._sink.append(BlocksRemoved(at, tuple(self.cache.evicted)))
            self.cache.evicted.clear()

    @staticmethod
    def _report_stored(
        sink: list[Event], seq: Sequence, first: int, end: int, fresh: set[int], at: float
    ) -> None:
        """One BlocksStored for every unbroken stretch of new blocks."""
        hashes = seq.job.block_hashes
        index = first
        while index < end:
            start = index
            while index < end and hashes[index] in fresh:
                index += 1
            if index > start:
                parent = hashes[start - 1] if start else None
                sink.append(BlocksStored(at, seq.job.id, start, tuple(hashes[start:index]), parent))
            else:
                index += 1
