"""Prompts on their way: what an endpoint is about to hold, between the decision and the events that tell.

Rules of this file:

- a prompt counts as held from the decision until its request has ended and the engine has told of its last block:
  while it runs its blocks are pinned in the engine, and the message that tells of them may come after the end. A
  block that is told and evicted at once is not waited for longer than a few messages, or two calls of ``tidy``;
- only every 16th block of a prompt is entered, so the work is small; from the deepest one that matches, the
  newest prompt entered there is compared block by block;
- size is bounded by the open leases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_STRIDE = 16
_FEW = 16
"""Messages after the end of a request by which its blocks have been told."""


class Hold:
    """One prompt on its way to one slot. ``release`` it once; more often does nothing."""

    __slots__ = ("_owner", "chain", "slot")

    def __init__(self, owner: InFlight, slot: int, chain: Sequence[int]) -> None:
        self._owner: InFlight | None = owner
        self.slot = slot
        self.chain = chain

    def release(self) -> None:
        """The request ended."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner._release(self)


class InFlight:
    """Prompts on their way, by block."""

    def __init__(self) -> None:
        self._marks: dict[int, dict[int, list[Hold]]] = {}
        self._of_slot: dict[int, dict[Hold, None]] = {}
        self._ended: dict[int, list[tuple[Hold, int]]] = {}
        """Slot -> ended, with the messages taken by then."""
        self._ended_before: list[Hold] = []

    def __len__(self) -> int:
        return sum(map(len, self._of_slot.values()))

    def add(self, slot: int, chain: Sequence[int]) -> Hold:
        """A prompt was given to a slot."""
        hold = Hold(self, slot, chain)
        self._of_slot.setdefault(slot, {})[hold] = None
        for at in range(0, len(chain), _STRIDE):
            self._marks.setdefault(chain[at], {}).setdefault(slot, []).append(hold)
        return hold

    def end(self, hold: Hold, taken: int) -> None:
        """Its request ended; ``taken``: messages of its slot's engine taken so far."""
        self._ended.setdefault(hold.slot, []).append((hold, taken))

    def settle(self, taken: Callable[[int], int], told: Callable[[int, int], bool]) -> None:
        """Release what ended and was told. ``taken``: messages of a slot; ``told``: whether the slot's engine holds a
        block, by its events."""
        for slot in list(self._ended):
            now = taken(slot)
            left = []
            for hold, then in self._ended[slot]:
                if now >= then + _FEW or not hold.chain or told(slot, hold.chain[-1]):
                    hold.release()
                else:
                    left.append((hold, then))
            if left:
                self._ended[slot] = left
            else:
                del self._ended[slot]

    def tidy(self) -> None:
        """Release what ended before the last call. Call it once a second or so."""
        for hold in self._ended_before:
            hold.release()
        self._ended_before = [hold for holds in self._ended.values() for hold, _ in holds]

    def match(self, chain: Sequence[int]) -> dict[int, int]:
        """Slot -> leading blocks that it is about to hold."""
        held: dict[int, int] = {}
        for at in range(0, len(chain), _STRIDE):
            here = self._marks.get(chain[at])
            if here is None:
                break
            for slot in here:
                held[slot] = at
        for slot, at in held.items():
            holds = self._marks[chain[at]][slot]
            held[slot] = _common(chain, holds[-1].chain, at + 1)
        return held

    def match_of(self, slot: int, chain: Sequence[int]) -> int:
        """As :meth:`match`, for one slot."""
        deepest, found = -1, None
        for at in range(0, len(chain), _STRIDE):
            holds = self._marks.get(chain[at], {}).get(slot)
            if holds is None:
                break
            deepest, found = at, holds[-1]
        return 0 if found is None else _common(chain, found.chain, deepest + 1)

    def purge(self, slot: int) -> None:
        """The slot's engine lost everything; what is on its way there is lost too."""
        for hold in list(self._of_slot.get(slot, ())):
            hold.release()

    def _release(self, hold: Hold) -> None:
        slot, chain = hold.slot, hold.chain
        mine = self._of_slot[slot]
        del mine[hold]
        if not mine:
            del self._of_slot[slot]
        for at in range(0, len(chain), _STRIDE):
            marks = self._marks[chain[at]]
            holds = marks[slot]
            holds.remove(hold)
            if not holds:
                del marks[slot]
                if not marks:
                    del self._marks[chain[at]]


def _common(one: Sequence[int], other: Sequence[int], start: int) -> int:
    end = min(len(one), len(other), start - 1 + _STRIDE)
    for at in range(start, end):
        if one[at] != other[at]:
            return at
    return max(end, start)
