"""The KV memory of an engine: blocks with reference counts, a prefix cache over them, LRU eviction.

Rules of this file:

- a block is *empty*, *private* (held by one sequence, no name yet: being filled, or a second copy of a
  named one), or *named* (its tokens' hash is known); a named block is *pinned* while sequences use it and
  *idle* otherwise;
- idle blocks count as free: they are evicted, least recently used first, when empty ones run out;
- a sequence gives its blocks back last block first, so that the tail of a prompt is evicted before its head
  (vLLM does the same);
- full blocks that nobody can name (generated tokens the caller has no hash for) stay idle too, under a
  negative name of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq


class BlockCache:
    """All KV blocks of one engine."""

    __slots__ = ("_idle", "_nameless", "_private", "_refs", "capacity", "evicted")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evicted: list[int] = []
        """Names evicted since the owner last looked; the owner clears it."""
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._private = 0
        self._nameless = 0

    @property
    def used(self) -> int:
        """Blocks that running sequences hold."""
        return self._private + len(self._refs) - len(self._idle)

    @property
    def free(self) -> int:
        """Blocks that can be had now: empty or idle."""
        return self.capacity - self.used

    @property
    def cached(self) -> int:
        """Named blocks, pinned or idle."""
        return len(self._refs)

    def __contains__(self, name: int) -> bool:
        """Whether a block of this name is cached."""
        return name in self._refs

    def match(self, names: Seq[int], limit: int) -> tuple[int, int]:
        """How many leading ``names`` (at most ``limit``) are cached, and how many of those are idle."""
        refs = self._refs
        found = idle = 0
        for name in names[:limit]:
            count = refs.get(name)
            if count is None:
                break
            found += 1
            if not count:
                idle += 1
        return found, idle

    def pin(self, names: Seq[int]) -> None:
        """Hold cached blocks for one more sequence."""
        refs, idle = self._refs, self._idle
        for name in names:
            count = refs[name]
            if not count:
                del idle[name]
            refs[name] = count + 1

    def take(self, count: int) -> None:
        """Hold ``count`` more private blocks, evicting idle ones as needed. The caller has checked
        ``free``.
        """
        short = count - (self.capacity - self._private - len(self._refs))
        self._private += count
        for _ in range(short):
            name, _none = self._idle.popitem(last=False)
            del self._refs[name]
            if name >= 0:
                self.evicted.append(name)

    def name(self, names: Seq[int]) -> list[int]:
        """Give private blocks their names; returns the new ones.

        A block whose name another block has already stays private.
        """
        refs = self._refs
        fresh = [name for name in dict.fromkeys(names) if name not in refs]
        refs.update(dict.fromkeys(fresh, 1))
        self._private -= len(fresh)
        return fresh

    def give_back(self, names: Seq[int], private: int, full_private: int) -> None:
        """Let go of one sequence's blocks: its ``names`` in prompt order and its ``private`` blocks.

        ``full_private`` of the private ones are full and stay idle like named ones; the others become empty.
        """
        refs, idle = self._refs, self._idle
        self._private -= private
        for _ in range(full_private):
            self._nameless -= 1
            refs[self._nameless] = 0
            idle[self._nameless] = None
        for name in reversed(names):
            count = refs[name] - 1
            refs[name] = count
            if not count:
                idle[name] = None

    def clear(self) -> None:
        """Drop every idle block. The caller has made sure that nothing is pinned if all must go."""
        for name in self._idle:
            del self._refs[name]
        self._idle.clear()
