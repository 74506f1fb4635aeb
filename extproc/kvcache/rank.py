"""One engine rank's stream of events: sequence numbers, gaps, replays and restarts. No socket, no clock.

Messages are numbered from 0 without holes; an engine keeps the last thousands for replay, and nothing else:
there is no snapshot. "Take" means: in order, into the index. Rules of this file:

    state     | event                                | what happens                            | next
    ----------+--------------------------------------+-----------------------------------------+----------
    WAITING   | begin, the engine can replay         | ask from 0                              | REPLAYING
    WAITING   | message 0                            | take                                    | LIVE
    WAITING   | message above 0                      | ask from 0; or, if the engine cannot    | REPLAYING
              |                                      | replay, what came before is lost: take  | or PARTIAL
    REPLAYING | message                              | kept for the end of the replay          | REPLAYING
    REPLAYING | replayed, the expected number        | take                                    | REPLAYING
    REPLAYING | first one replayed is above 0, or    | older ones have left the ring: purge if | REPLAYING
              | above the last one taken             | there were any; take                    |
    REPLAYING | replayed, a hole                     | left; ask again from the hole (3 times) | REPLAYING
    REPLAYING | replayed anew, but not what we took  | the engine restarted meanwhile: purge,  | REPLAYING
              | under this number                    | ask from 0                              |
    REPLAYING | end                                  | take what was kept, in order; a hole is | LIVE or
              |                                      | asked for again or purges               | PARTIAL
    REPLAYING | no answer                            | purge if there is a hole; take          | PARTIAL
    REPLAYING | no answer, and nothing came          | as if there were no replay              | WAITING
    REPLAYING | end, nothing was replayed or kept    | from 0: a new engine                    | LIVE
              |                                      | else it restarted: purge, ask from 0    | REPLAYING
    LIVE,     | the expected number                  | take                                    | same
    PARTIAL   | above it                             | ask from the last one taken             | REPLAYING
              | ... but the engine cannot replay     | purge; take                             | PARTIAL
              | below it, and it fell: not above the | the engine restarted: purge; take 0, or | LIVE or
              | last message, or made after the      | ask from 0                              | REPLAYING
              | newest                               |                                         |
              | below it otherwise                   | told by the replay before: dropped      | same
    LIVE,     | connected again, the engine can      | ask from the last one taken             | REPLAYING
    PARTIAL   | replay                               |                                         |
    any       | restart seen elsewhere (metrics)     | purge, ask from 0                       | REPLAYING
    any       | a batch that cannot be read          | it may have held removals               | PARTIAL
    PARTIAL   | AllBlocksCleared taken               | all that is held is known again         | LIVE

A gap's replay begins one message early: if that one is not what we took, this is another life of the engine.
A restart that starts new numbers and passes ours before we hear of it is found that way. If what we missed of
the new life ends just below the number we expect, only the engine's metrics tell (``restarted``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from xxhash import xxh3_64_intdigest

from extproc.kvcache.events import Cleared, Odd, WireError, decode, time_of
from extproc.kvcache.precise import PreciseIndex

_MAX_KEPT = 20_000
"""Messages kept during a replay: more than an engine's ring."""
_MAX_TRIES = 3
_FAR_BEHIND = 16
"""Messages received and not yet taken, above which what we know is not called exact."""


class State(StrEnum):
    """What we know of a rank: see the table."""

    WAITING = "waiting"
    REPLAYING = "replaying"
    LIVE = "live"
    PARTIAL = "partial"


@dataclass(slots=True)
class RankCounts:
    """Running totals of all ranks, read by the metrics."""

    messages: int = 0
    gaps: int = 0
    restarts: int = 0
    replays: int = 0
    replays_failed: int = 0
    duplicates: int = 0
    unreadable: int = 0


class Rank:
    """One rank. Feed it, ``step`` it until it has no work, and send the replay request it ``wants``."""

    __slots__ = (
        "_answered",
        "_block_size",
        "_digest",
        "_hole",
        "_index",
        "_kept",
        "_last",
        "_lost",
        "_newest",
        "_next",
        "_slot",
        "_todo",
        "_tries",
        "_work",
        "can_replay",
        "counts",
        "shelf",
        "state",
        "taken",
        "wants",
    )

    def __init__(self, index: PreciseIndex, slot: int, counts: RankCounts, *, can_replay: bool) -> None:
        self.state = State.WAITING
        self.can_replay = can_replay
        self.counts = counts
        self.wants: int | None = None
        """Number to ask a replay from; the owner sets it back to None when asked."""
        self.shelf = index.shelf(slot)
        self._index = index
        self._slot = slot
        self._block_size: int | None = None
        self._next = 0
        """Number expected next."""
        self._last = -1
        """Number of the last message that came by itself, not by replay."""
        self._digest = 0
        """Of the last one taken."""
        self._newest = float("-inf")
        """When the newest one taken was made, by the engine's clock."""
        self._lost = False
        """Something before or in between is not known."""
        self._kept: deque[tuple[int, bytes]] = deque()
        self._answered = False
        """The replay has told something."""
        self._hole = False
        """The replay left something out."""
        self._tries = 0
        self._todo: deque[bytes] = deque()
        self._work: Iterator[int] | None = None
        self.taken = 0
        """Messages taken into the index."""

    @property
    def exact(self) -> bool:
        """What the shelf says is all that the engine holds."""
        return self.state is State.LIVE and len(self._todo) <= _FAR_BEHIND and not self.shelf.incomplete

    @property
    def behind(self) -> int:
        """Messages received and not yet taken."""
        return len(self._todo) + (self._work is not None)

    @property
    def block_size(self) -> int | None:
        """Tokens in a block, as last told; None before the first."""
        if self.shelf.block_size is not None:
            self._block_size = self.shelf.block_size
        return self._block_size

    @property
    def expected(self) -> int:
        """The number that should come next."""
        return self._next

    def begin(self) -> None:
        """Connected for the first time."""
        if self.can_replay and self.state is State.WAITING:
            self._ask(0)

    def reconnected(self) -> None:
        """The connection broke and was made again: messages may be missing, and it may be another life."""
        if self.can_replay and self.state in (State.LIVE, State.PARTIAL):
            self._ask(max(self._next - 1, 0))

    def message(self, number: int, payload: bytes) -> None:
        """One message came by itself."""
        self.counts.messages += 1
        if self.state is State.REPLAYING and number <= self._last:
            self._restarted()
        self._hear(number, payload)
        self._last = number

    def replayed(self, number: int, payload: bytes) -> None:
        """One message came by replay."""
        if self.state is not State.REPLAYING or self.wants is not None:
            return
        first, self._answered = not self._answered, True
        if first and self._next and number != self._next - 1:
            # The last one taken has left the ring, and with it perhaps more.
            self._give_up(number)
        elif first and self._next and xxh3_64_intdigest(payload) != self._digest:
            self._restarted()
            return
        elif first and number > self._next:
            self._give_up(number)
        if number == self._next:
            self._take(number, payload)
        elif number > self._next:
            self._hole = True

    def replay_ended(self) -> None:
        """The replay is complete, as the engine says."""
        if self.state is State.REPLAYING and self.wants is None:
            self._finish(answered=True)

    def replay_failed(self) -> None:
        """The engine does not answer."""
        if self.state is State.REPLAYING and self.wants is None:
            self.counts.replays_failed += 1
            self._finish(answered=False)

    def restarted(self) -> None:
        """The engine restarted, as its metrics say."""
        self._restarted()

    def close(self) -> None:
        """The rank is gone."""
        self._todo.clear()
        self._work = None
        self._index.discard(self.shelf)

    def step(self) -> bool:
        """Take one slice of what came; True while there is more."""
        if self._work is None:
            if not self._todo:
                return False
            self._work = self._read(self._todo.popleft())
        if next(self._work, None) is None:
            self._work = None
            self.taken += 1
        return self._work is not None or bool(self._todo)

    def _read(self, payload: bytes) -> Iterator[int]:
        counts = self._index.counts
        try:
            batch = decode(payload)
        except WireError:
            self.counts.unreadable += 1
            self._doubt()
            return
        self._newest = max(self._newest, batch.at)
        for event in batch:
            if event is Odd.UNDECODABLE:
                counts.undecodable += 1
                self._doubt()
                yield 1
                continue
            if event is Odd.UNKNOWN:
                counts.unknown += 1
                yield 1
                continue
            yield from self._index.apply(self.shelf, event)
            if isinstance(event, Cleared):
                self._empty_shelf()
                self._lost = False
                if self.state is State.PARTIAL:
                    self.state = State.LIVE

    def _hear(self, number: int, payload: bytes) -> None:
        """A message in its place: see the table."""
        if self.state is State.REPLAYING:
            self._kept.append((number, payload))
            if len(self._kept) > _MAX_KEPT:
                self._kept.popleft()
        elif number == self._next:
            self._take(number, payload)
            self._settle()
        elif number > self._next:
            self._skipped_to(number, payload)
        elif number <= self._last or self._made_later(payload):
            self._restarted()
            self._hear(number, payload)
        else:
            self.counts.duplicates += 1

    def _skipped_to(self, number: int, payload: bytes) -> None:
        if self.state is not State.WAITING:
            self.counts.gaps += 1
        if self.can_replay:
            self._ask(max(self._next - 1, 0))
            self._hear(number, payload)
        else:
            self._give_up(number)
            self._take(number, payload)
            self._settle()

    def _give_up(self, number: int) -> None:
        """What came before this number stays unknown."""
        if self._next:
            self._purge()
        self._next = number
        self._lost = True

    def _take(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._digest = xxh3_64_intdigest(payload)
        self._todo.append(payload)

    def _ask(self, number: int) -> None:
        self.state = State.REPLAYING
        self.wants = number
        self._answered = self._hole = False
        self.counts.replays += 1

    def _finish(self, *, answered: bool) -> None:
        kept, self._kept = self._kept, deque()
        while kept and kept[0][0] < self._next and not self._made_later(kept[0][1]):
            self.counts.duplicates += 1
            kept.popleft()
        if answered and not self._answered and not kept:
            if self._next:
                # It no longer knows the number we took last: another life.
                self._restarted()
                return
            self._lost = False
        elif self._hole or (kept and kept[0][0] > self._next):
            if answered and self._tries < _MAX_TRIES:
                self._tries += 1
                self._kept = kept
                self._ask(max(self._next - 1, 0))
                return
            self._give_up(kept[0][0] if kept else self._next)
        elif not answered and not self._next and not kept:
            self.state = State.WAITING
            return
        self._tries = 0
        self._settle()
        for number, payload in kept:
            self._hear(number, payload)

    def _settle(self) -> None:
        self.state = State.PARTIAL if self._lost else State.LIVE

    def _doubt(self) -> None:
        self._lost = True
        if self.state is State.LIVE:
            self.state = State.PARTIAL

    def _restarted(self) -> None:
        self.counts.restarts += 1
        self._purge()
        self._next = 0
        self._last = -1
        self._lost = False
        self._tries = 0
        self._newest = float("-inf")
        self._kept.clear()
        if self.can_replay:
            self._ask(0)
        else:
            self.state = State.WAITING

    def _purge(self) -> None:
        self._todo.clear()
        self._work = None
        self._empty_shelf()

    def _empty_shelf(self) -> None:
        self._index.discard(self.shelf)
        self.shelf = self._index.shelf(self._slot)

    def _made_later(self, payload: bytes) -> bool:
        """Whether a message was made after all that were taken."""
        try:
            newest = max([self._newest, *(time_of(one) for one in list(self._todo)[-1:])])
            return time_of(payload) > newest
        except WireError:
            return False
