"""What each endpoint's prefix cache holds, told from the prompts we sent there. No engine takes part.

Rules of this file:

- an endpoint is a small integer, its slot. A block is held by a slot from the moment a prompt is given to it;
- per slot, blocks are kept in the order of last use. A prompt is entered from its last block to its first, so
  heads are always younger than tails: when room is wanted tails go first, and what is left of a prompt is a
  prefix of it;
- room is counted in blocks: the engine's own KV capacity. Generated text takes room too (``occupy``) and ages
  like any block;
- what an answer says is not known here, but the conversation's next prompt repeats it. A prompt that goes on
  from exactly where another ended is expected to hold that one's answer too, once, and only if it is long
  enough;
- a :class:`Claim` remembers which blocks a prompt brought. Until it is kept they stand on its word alone:
  ``undo`` takes back those that no other claim stands for. After either, or when the slot was purged, a claim
  does nothing;
- one dict maps a block to a bit mask of its holders, so one walk along a prompt answers for all endpoints,
  and its cost does not depend on how many blocks there are;
- forgetting a whole endpoint is spread over later calls (``drain``): nobody waits for a big index to be
  emptied.

Not for several threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_DRAIN_STEP = 64


class _Shelf:
    """One slot's blocks, oldest first. A block's value is how many open claims it stands on, 0 once one was
    kept; a negative key is an answer and its value how many blocks that takes. ``-1 - hash`` is the answer to
    the prompt that ended with this block, other negative keys are answers that nothing can follow."""

    __slots__ = ("bit", "blocks", "cap", "size", "wanted")

    def __init__(self, bit: int, wanted: int) -> None:
        self.bit = bit
        self.blocks: OrderedDict[int, int] = OrderedDict()
        self.size = 0
        self.wanted = wanted
        self.cap = wanted


class Claim:
    """The blocks one prompt brought to one slot. Exactly one of ``keep`` and ``undo`` should follow."""

    __slots__ = ("_hashes", "_index", "_shelf", "_start")

    def __init__(
        self, index: ApproximateIndex, shelf: _Shelf | None, hashes: Sequence[int], start: int
    ) -> None:
        self._index = index
        self._shelf = shelf
        self._hashes = hashes
        self._start = start

    @property
    def brought(self) -> int:
        """How many blocks stand, or stood, on this claim."""
        return len(self._hashes) - self._start

    def keep(self) -> None:
        """The engine really got the prompt."""
        shelf, self._shelf = self._shelf, None
        if shelf is not None:
            blocks = shelf.blocks
            for value in self._hashes[self._start :]:
                if blocks.get(value):
                    blocks[value] = 0

    def undo(self) -> None:
        """The engine never got the prompt: forget the blocks that stand on this claim alone."""
        shelf, self._shelf = self._shelf, None
        if shelf is not None:
            self._index._undo(shelf, self._hashes[self._start :])


class ApproximateIndex:
    """Blocks by holder. ``max_blocks`` bounds the sum over all slots; ``default_blocks`` is a slot's room
    until :meth:`resize` knows better."""

    def __init__(self, max_blocks: int = 2_000_000, default_blocks: int = 8192) -> None:
        self.max_blocks = max_blocks
        self.default_blocks = default_blocks
        self.evicted_total = 0
        self._masks: dict[int, int] = {}
        self._shelves: dict[int, _Shelf] = {}
        self._slots: list[int] = []
        """Bit position -> slot, -1 while the bit has no owner. Bits are not slots: a purged slot gets a new
        bit at once, the old one is free again when its blocks are gone."""
        self._free_bits: list[int] = []
        self._owned = 0
        """Mask of the bits that have an owner."""
        self._dying: list[_Shelf] = []
        self._size = 0
        self._anonymous = -(1 << 64)
        """Last key of an answer that nothing can follow: below every ``-1 - hash``."""

    @property
    def entries(self) -> int:
        """Blocks held, summed over the slots (gauge; never above ``cap`` once drained)."""
        return self._size

    @property
    def cap(self) -> int:
        """Bound of ``entries`` (gauge)."""
        return self.max_blocks

    @property
    def distinct(self) -> int:
        """Different blocks known (gauge)."""
        return len(self._masks)

    def blocks_of(self, slot: int) -> int:
        """Blocks a slot holds, generated text included (gauge)."""
        shelf = self._shelves.get(slot)
        return shelf.size if shelf else 0

    def room_of(self, slot: int) -> int:
        """Blocks a slot may hold."""
        shelf = self._shelves.get(slot)
        return shelf.cap if shelf else self.default_blocks

    def wanted_of(self, slot: int) -> int:
        """Blocks the slot's engine has room for, before the bound over all slots; 0 for an unknown slot."""
        shelf = self._shelves.get(slot)
        return shelf.wanted if shelf else 0

    def match(self, hashes: Sequence[int]) -> dict[int, int]:
        """Slot -> how many leading blocks it holds, for every slot that holds the first."""
        if not hashes:
            return {}
        masks = self._masks
        alive = masks.get(hashes[0], 0) & self._owned
        if not alive:
            return {}
        slots = self._slots
        held: dict[int, int] = {}
        depth = 0
        for value in hashes:
            still = alive & masks.get(value, 0)
            if still != alive:
                lost = alive & ~still
                while lost:
                    bit = lost & -lost
                    held[slots[bit.bit_length() - 1]] = depth
                    lost ^= bit
                alive = still
                if not alive:
                    return held
            depth += 1
        while alive:
            bit = alive & -alive
            held[slots[bit.bit_length() - 1]] = depth
            alive ^= bit
        return held

    def expect(self, hashes: Sequence[int]) -> dict[int, int]:
        """As :meth:`match`, with the answers that the prompt seems to repeat."""
        held = self.match(hashes)
        for slot, depth in held.items():
            if depth < len(hashes):
                answer = self._shelves[slot].blocks.get(-1 - hashes[depth - 1])
                if answer and depth + answer <= len(hashes):
                    held[slot] = depth + answer
        return held

    def expect_of(self, slot: int, hashes: Sequence[int]) -> int:
        """As :meth:`expect`, for one slot; 0 when it holds nothing."""
        shelf = self._shelves.get(slot)
        if shelf is None:
            return 0
        depth = 0
        for value in hashes:
            if value not in shelf.blocks:
                break
            depth += 1
        if 0 < depth < len(hashes):
            answer = shelf.blocks.get(-1 - hashes[depth - 1], 0)
            if depth + answer <= len(hashes):
                return depth + answer
        return depth

    def insert(self, slot: int, hashes: Sequence[int]) -> Claim:
        """The prompt goes to this slot: it holds all its blocks from now on, on the word of the claim."""
        shelf = self._shelf(slot)
        count = min(len(hashes), shelf.cap)
        blocks, masks, bit = shelf.blocks, self._masks, shelf.bit
        start = count
        new = 0
        touch = blocks.move_to_end
        for at in range(count - 1, -1, -1):
            value = hashes[at]
            pins = blocks.get(value)
            if pins is None:
                blocks[value] = 1
                known = masks.get(value)
                # A sole holder's mask is the shelf's own integer: no new object for most blocks.
                masks[value] = bit if known is None else known | bit
                new += 1
                start = at
            else:
                touch(value)
                if pins:
                    blocks[value] = pins + 1
                    start = at
        shelf.size += new
        self._size += new
        if 0 < new < count:
            # The answer the prompt goes on from, if any, is among its own blocks now.
            answer = blocks.pop(-1 - hashes[count - new - 1], 0)
            shelf.size -= answer
            self._size -= answer
        self._make_room(shelf, new)
        return Claim(self, shelf, hashes[:count] if count < len(hashes) else hashes, start)

    def occupy(self, slot: int, blocks: int, after: int | None = None) -> None:
        """An answer of this many blocks took room on the slot. ``after``: the last block of its prompt, if no
        other prompt ended there."""
        shelf = self._shelf(slot)
        blocks = min(blocks, shelf.cap)
        if blocks <= 0:
            return
        if after is not None and after in shelf.blocks:
            key = -1 - after
            replaced = shelf.blocks.pop(key, 0)
        else:
            self._anonymous -= 1
            key, replaced = self._anonymous, 0
        shelf.blocks[key] = blocks
        shelf.size += blocks - replaced
        self._size += blocks - replaced
        self._make_room(shelf, blocks)

    def resize(self, slot: int, blocks: int) -> None:
        """The slot's engine has room for this many blocks. Excess goes with the next calls, oldest first."""
        shelf = self._shelf(slot)
        shelf.wanted = max(blocks, 1)
        self._share()

    def purge(self, slot: int) -> None:
        """Nothing is known any more of what the slot holds; open claims on it end. Its room is the default
        again."""
        shelf = self._shelves.pop(slot, None)
        if shelf is None:
            return
        self._owned &= ~shelf.bit
        self._slots[shelf.bit.bit_length() - 1] = -1
        self._dying.append(shelf)
        self._share()
        self.drain(_DRAIN_STEP)

    def drain(self, blocks: int = 2048) -> bool:
        """Forget up to this many blocks that should be gone; True while more are left. Call it when idle."""
        left = blocks
        while left > 0 and self._dying:
            shelf = self._dying[-1]
            left -= self._evict(shelf, 0, left)
            if not shelf.blocks:
                self._dying.pop()
                self._free_bits.append(shelf.bit.bit_length() - 1)
        if self._dying:
            return True
        for shelf in self._shelves.values():
            if shelf.size > shelf.cap:
                left -= self._evict(shelf, shelf.cap, left)
                if left <= 0:
                    return True
        return False

    def _shelf(self, slot: int) -> _Shelf:
        shelf = self._shelves.get(slot)
        if shelf is None:
            if self._free_bits:
                position = self._free_bits.pop()
                self._slots[position] = slot
            else:
                position = len(self._slots)
                self._slots.append(slot)
            shelf = _Shelf(1 << position, self.default_blocks)
            self._owned |= shelf.bit
            self._shelves[slot] = shelf
            self._share()
        return shelf

    def _share(self) -> None:
        wanted = sum(shelf.wanted for shelf in self._shelves.values())
        scale = min(1.0, self.max_blocks / wanted) if wanted else 1.0
        for shelf in self._shelves.values():
            shelf.cap = max(int(shelf.wanted * scale), 1)

    def _make_room(self, shelf: _Shelf, new: int) -> None:
        if shelf.size > shelf.cap:
            self._evict(shelf, shelf.cap, new + _DRAIN_STEP)
        if self._dying or self._size > self.max_blocks:
            self.drain(new + _DRAIN_STEP)

    def _evict(self, shelf: _Shelf, down_to: int, at_most: int) -> int:
        blocks, masks, bit = shelf.blocks, self._masks, shelf.bit
        gone = entries = 0
        while shelf.size - gone > down_to and entries < at_most and blocks:
            value, weight = blocks.popitem(last=False)
            entries += 1
            if value < 0:
                gone += weight
                continue
            gone += 1
            rest = masks[value] & ~bit
            if rest:
                masks[value] = rest
            else:
                del masks[value]
        shelf.size -= gone
        self._size -= gone
        self.evicted_total += gone
        return entries

    def _undo(self, shelf: _Shelf, hashes: Sequence[int]) -> None:
        blocks, masks, bit = shelf.blocks, self._masks, shelf.bit
        gone = 0
        for value in hashes:
            pins = blocks.get(value)
            if not pins:
                continue
            if pins > 1:
                blocks[value] = pins - 1
                continue
            del blocks[value]
            gone += 1
            rest = masks[value] & ~bit
            if rest:
                masks[value] = rest
            else:
                del masks[value]
        shelf.size -= gone
        self._size -= gone
