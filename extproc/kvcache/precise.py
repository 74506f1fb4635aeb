"""What each endpoint's KV cache holds, told by the engines' own events.

Rules of this file:

- a *shelf* is what one data-parallel rank of one endpoint holds. Blocks are named by our own token chain
  (``token_chain``); the engine's names are kept to find parents and to follow removals;
- a block whose parent is not on the shelf is an orphan: where it belongs is unknown, so it is not kept, and
  neither are those behind it;
- an engine may hold the same block several times (vLLM does not merge copies) and in several media. Every
  store counts one copy, every removal takes one; the block is held until the last is gone;
- a block is worth what its best medium is worth: 1 on the GPU, less where it must be loaded first, by
  ``worth``. Media worth nothing are ignored;
- only groups of full attention say what a prefix match is; the first such group of a rank is followed, events
  of others are left out. So are blocks of another size than the rank's first ones;
- one dict maps a block to a bit mask of its holders (as in ``approximate``): one walk along a prompt answers
  for all endpoints. An endpoint of several ranks counts their mean, because the engine picks the rank;
- blocks are bounded over all shelves. A shelf that had to leave some out is no longer exact until it is
  purged;
- blocks behind each other mostly have the same holders, and then share one mask object: a walk compares objects
  before it compares bits;
- forgetting a shelf is spread over later calls (``drain``).

Not for several threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from extproc.kvcache.events import Cleared, Event, Removed, Stored
from extproc.kvcache.token_chain import TOKEN_BYTES, mixed, packed, root

SLICE = 16
"""Blocks taken in one go: about 50 microseconds."""
_FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
DEFAULT_WORTH: Mapping[str, float] = {"GPU": 1.0, "CPU": 0.7, "STORAGE": 0.4, "DISK": 0.4}
"""Medium -> what a token there saves, in tokens on the GPU."""


@dataclass(slots=True)
class PreciseCounts:
    """Running totals, read by the metrics."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    orphans: int = 0
    skipped: int = 0
    """Blocks of other groups, sizes or media."""
    left_out: int = 0
    """Blocks for which there was no room."""
    undecodable: int = 0
    unknown: int = 0


class Shelf:
    """What one rank holds. ``bit`` is its place in the masks."""

    __slots__ = (
        "bit",
        "block_size",
        "copies",
        "group",
        "incomplete",
        "names",
        "others",
        "roots",
        "slot",
        "twins",
    )

    def __init__(self, slot: int, bit: int) -> None:
        self.slot = slot
        self.bit = bit
        self.block_size: int | None = None
        """Tokens in a block; None before the first one."""
        self.group: int | None = None
        self.names: dict[int, int] = {}
        """Engine's name -> ours."""
        self.copies: dict[int, dict[str, int]] = {}
        """Engine's name -> medium -> copies, where it is not just one on the GPU."""
        self.twins: dict[int, int] = {}
        """Our name -> further engine names for it (an adapter that was replaced under its name)."""
        self.others: set[int] = set()
        """Groups that are not followed."""
        self.roots: dict[str, int] = {}
        self.incomplete = False
        """Blocks were left out for want of room."""


class PreciseIndex:
    """Blocks by holder. ``max_blocks`` bounds the sum over all shelves."""

    def __init__(
        self, *, seed: int = 0, max_blocks: int = 2_000_000, worth: Mapping[str, float] | None = None
    ) -> None:
        self.max_blocks = max_blocks
        self.counts = PreciseCounts()
        self.worth = dict(DEFAULT_WORTH if worth is None else worth)
        self._seed = seed
        self._masks: dict[int, int] = {}
        self._lesser: dict[int, dict[int, float]] = {}
        """Our name -> bit -> what is lost against a block on the GPU."""
        self._shelves: list[Shelf | None] = []
        """By bit position; None while the bit has no owner."""
        self._free_bits: list[int] = []
        self._owned = 0
        self._cut = (0, 0, 0)
        """The last mask that a bit was taken from, the bit, and what was left."""
        self._ranks: dict[int, int] = {}
        """Slot -> shelves."""
        self._dying: list[Shelf] = []
        self._size = 0

    @property
    def entries(self) -> int:
        """Blocks held, summed over the shelves (gauge)."""
        return self._size

    def shelf(self, slot: int) -> Shelf:
        """A new empty shelf for one rank of this slot."""
        if self._free_bits:
            position = self._free_bits.pop()
        else:
            position = len(self._shelves)
            self._shelves.append(None)
        shelf = Shelf(slot, 1 << position)
        self._shelves[position] = shelf
        self._owned |= shelf.bit
        self._ranks[slot] = self._ranks.get(slot, 0) + 1
        return shelf

    def discard(self, shelf: Shelf) -> None:
        """The rank is gone, or nothing is known of it any more (then ask for a new shelf)."""
        if not self._owned & shelf.bit:
            return
        self._owned &= ~shelf.bit
        self._shelves[shelf.bit.bit_length() - 1] = None
        self._ranks[shelf.slot] -= 1
        if not self._ranks[shelf.slot]:
            del self._ranks[shelf.slot]
        self._dying.append(shelf)
        self.drain(SLICE)

    def holds(self, slot: int, value: int) -> bool:
        """Whether any rank of the slot holds a block."""
        bits = self._masks.get(value, 0) & self._owned
        while bits:
            bit = bits & -bits
            bits ^= bit
            shelf = self._shelves[bit.bit_length() - 1]
            if shelf is not None and shelf.slot == slot:
                return True
        return False

    def match(self, chain: Sequence[int]) -> dict[int, float]:
        """Slot -> worth of its leading blocks, for every slot that holds the first."""
        if not chain:
            return {}
        masks, lesser = self._masks, self._lesser
        alive = masks.get(chain[0], 0) & self._owned
        held: dict[int, float] = {}
        if not alive:
            return held
        lost_worth: dict[int, float] = {}
        depth = 0
        last = -1
        get = masks.get
        for value in chain:
            mask = get(value, 0)
            if mask is not last:
                last = mask
                still = alive & mask
                if still != alive:
                    self._credit(held, alive & ~still, depth, lost_worth)
                    alive = still
                    if not alive:
                        return held
            if lesser and (less := lesser.get(value)):
                for bit, loss in less.items():
                    lost_worth[bit] = lost_worth.get(bit, 0.0) + loss
            depth += 1
        self._credit(held, alive, depth, lost_worth)
        return held

    def _credit(self, held: dict[int, float], bits: int, depth: int, lost: dict[int, float]) -> None:
        shelves, ranks = self._shelves, self._ranks
        while bits:
            bit = bits & -bits
            bits ^= bit
            shelf = shelves[bit.bit_length() - 1]
            if shelf is not None:
                worth = (depth - lost.get(bit, 0.0)) if lost else depth
                slot = shelf.slot
                held[slot] = held.get(slot, 0.0) + worth / ranks[slot]

    def apply(self, shelf: Shelf, event: Event) -> Iterator[int]:
        """Take one event; yields after every :data:`SLICE` blocks how many were taken, so that the caller can
        let others work."""
        if isinstance(event, Stored):
            yield from self._store(shelf, event)
        elif isinstance(event, Removed):
            yield from self._remove(shelf, event)
        elif isinstance(event, Cleared):
            self.counts.cleared += 1

    def _store(self, shelf: Shelf, event: Stored) -> Iterator[int]:
        counts = self.counts
        loss = 1.0 - self.worth.get(event.medium, 0.0)
        if not event.tokens and loss < 1.0:
            for name in event.names:
                if name in shelf.names:
                    self._add_copy(shelf, name, event.medium)
                else:
                    counts.orphans += 1
            return
        if loss >= 1.0 or not self._follows(shelf, event):
            counts.skipped += len(event.names)
            return
        parent = event.parent
        if parent is None:
            value = shelf.roots.get(event.adapter)
            if value is None:
                if len(shelf.roots) > 1024:
                    shelf.roots.clear()
                value = shelf.roots[event.adapter] = root(self._seed, event.block_size, event.adapter)
        else:
            known = shelf.names.get(parent)
            if known is None:
                counts.orphans += len(event.names)
                return
            value = known
        try:
            data = packed(event.tokens)
        except (OverflowError, TypeError):
            counts.undecodable += 1
            return
        medium = "" if loss <= 0.0 and event.medium == "GPU" else event.medium
        width = event.block_size * TOKEN_BYTES
        masks, names, bit, digest = self._masks, shelf.names, shelf.bit, xxh3_64_intdigest
        extra = event.extra
        others: int | None = None
        both = bit
        offset = since = 0
        for at, name in enumerate(event.names):
            if extra is not None and (more := extra[at]) is not None:
                besides = [one for one in more if one != event.adapter]
                if besides:
                    value = mixed(value, besides)
            value = digest(data[offset : offset + width], value)
            offset += width
            if name in names:
                # Another copy; or another medium; or the same name for other tokens, which cannot be.
                value = names[name]
                self._add_copy(shelf, name, medium)
            elif self._size >= self.max_blocks:
                counts.left_out += len(event.names) - at
                shelf.incomplete = True
                return
            else:
                names[name] = value
                self._size += 1
                held = masks.get(value)
                if held is None:
                    masks[value] = bit
                elif held & bit:
                    shelf.twins[value] = shelf.twins.get(value, 0) + 1
                else:
                    if held is not others:
                        others, both = held, held | bit
                    masks[value] = both
                if medium:
                    shelf.copies[name] = {medium: 1}
                    self._weigh(shelf, name)
                counts.stored += 1
            since += 1
            if since >= SLICE:
                yield since
                since = 0
        if since:
            yield since

    def _follows(self, shelf: Shelf, event: Stored) -> bool:
        group, kind = event.group, event.kind
        full = kind in _FULL_ATTENTION if kind is not None else not group
        if shelf.block_size is None and full:
            shelf.block_size = event.block_size
            shelf.group = group
        if not full or group != shelf.group:
            if group is not None:
                shelf.others.add(group)
            return False
        return event.block_size == shelf.block_size

    def _remove(self, shelf: Shelf, event: Removed) -> Iterator[int]:
        if event.group is not None and event.group in shelf.others:
            return
        since = 0
        medium = event.medium
        for name in event.names:
            value = shelf.names.get(name)
            if value is None:
                continue
            copies = shelf.copies.get(name)
            if copies is None:
                if medium == "GPU":
                    self._drop(shelf, name, value)
            elif medium in copies:
                copies[medium] -= 1
                if not copies[medium]:
                    del copies[medium]
                if not copies:
                    del shelf.copies[name]
                    self._drop(shelf, name, value)
                else:
                    self._weigh(shelf, name)
                    if copies == {"GPU": 1}:
                        del shelf.copies[name]
            since += 1
            if since >= SLICE:
                yield since
                since = 0
        if since:
            yield since

    def _add_copy(self, shelf: Shelf, name: int, medium: str) -> None:
        copies = shelf.copies.get(name)
        if copies is None:
            copies = shelf.copies[name] = {"GPU": 1}
        medium = medium or "GPU"
        copies[medium] = copies.get(medium, 0) + 1
        self._weigh(shelf, name)

    def _weigh(self, shelf: Shelf, name: int) -> None:
        """Bring what the block is worth up to date with its media."""
        value = shelf.names[name]
        best = max(self.worth.get(medium, 0.0) for medium in shelf.copies[name])
        less = self._lesser.get(value)
        if best >= 1.0:
            if less is not None and less.pop(shelf.bit, None) is not None and not less:
                del self._lesser[value]
        else:
            self._lesser.setdefault(value, {})[shelf.bit] = 1.0 - best

    def _drop(self, shelf: Shelf, name: int, value: int) -> None:
        del shelf.names[name]
        self._size -= 1
        self.counts.removed += 1
        twins = shelf.twins.get(value)
        if twins:
            if twins == 1:
                del shelf.twins[value]
            else:
                shelf.twins[value] = twins - 1
            return
        self._unmask(shelf.bit, value)

    def _unmask(self, bit: int, value: int) -> None:
        held = self._masks.get(value, 0)
        if held is not self._cut[0] or bit != self._cut[1]:
            self._cut = (held, bit, held & ~bit)
        rest = self._cut[2]
        if rest:
            self._masks[value] = rest
        else:
            self._masks.pop(value, None)
        less = self._lesser.get(value)
        if less is not None and less.pop(bit, None) is not None and not less:
            del self._lesser[value]

    def drain(self, blocks: int = 2048) -> bool:
        """Forget up to this many blocks of discarded shelves; True while more are left. Call it when idle."""
        left = blocks
        while self._dying and left > 0:
            shelf = self._dying[-1]
            names = shelf.names
            while names and left > 0:
                _, value = names.popitem()
                self._unmask(shelf.bit, value)
                self._size -= 1
                left -= 1
            if not names:
                self._dying.pop()
                self._free_bits.append(shelf.bit.bit_length() - 1)
        return bool(self._dying)
