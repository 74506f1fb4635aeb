"""The stream of one engine's events: numbers, gaps, replays, restarts; and that the index equals what the engine holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.kvcache.precise import PreciseIndex
from extproc.kvcache.rank import Rank, RankCounts, State
from tests.unit.kv_engine import BLOCK, KvEngine, batch, chain


class Link:
    """An engine and our rank, with everything between them in the test's hand."""

    def __init__(
        self, *, can_replay: bool = True, ring: int = 1000, index: PreciseIndex | None = None
    ) -> None:
        self.engine = KvEngine(ring)
        self.index = index or PreciseIndex()
        self.counts = RankCounts()
        self.rank = Rank(self.index, 0, self.counts, can_replay=can_replay)

    def deliver(self, count: int | None = None) -> None:
        """Hand over what the engine sent."""
        sent = self.engine.sent
        taken, self.engine.sent = (sent, []) if count is None else (sent[:count], sent[count:])
        for message in taken:
            self.rank.message(*message)

    def lose(self) -> None:
        """What the engine sent does not arrive."""
        self.engine.sent = []

    def replay(self) -> None:
        """Answer replays until none is wanted."""
        for _ in range(20):
            if self.rank.wants is None:
                return
            start, self.rank.wants = self.rank.wants, None
            for number, payload in self.engine.ring:
                if number >= start:
                    self.rank.replayed(number, payload)
            self.rank.replay_ended()
        raise AssertionError("replays without end")

    def settle(self) -> None:
        """Everything on the way arrives, everything is taken."""
        self.deliver()
        self.replay()
        while self.rank.step():
            pass

    def matched(self, tokens: list[int]) -> float:
        return self.index.match(chain(tokens)).get(0, 0)


PROMPT = list(range(24))


def connected(**more: object) -> Link:
    link = Link(**more)  # type: ignore[arg-type]
    link.rank.begin()
    link.settle()
    return link


def test_a_new_engine_is_live_at_once() -> None:
    link = connected()
    assert link.rank.state is State.LIVE
    link.engine.prompt(PROMPT)
    link.settle()
    assert link.matched(PROMPT) == 6


def test_what_was_cached_before_we_came_is_replayed() -> None:
    link = Link()
    link.engine.prompt(PROMPT)
    link.lose()
    link.rank.begin()
    link.settle()
    assert link.rank.exact
    assert link.matched(PROMPT) == 6


def test_a_truncated_replay_leaves_the_rank_partial() -> None:
    link = Link(ring=2)
    for start in (0, 100, 200):
        link.engine.prompt([start + token for token in PROMPT])
    link.lose()
    link.rank.begin()
    link.settle()
    assert link.rank.state is State.PARTIAL
    assert link.matched(PROMPT) == 0
    assert link.matched([100 + token for token in PROMPT]) == 6


def test_without_replay_a_first_number_above_0_is_partial_and_0_is_live() -> None:
    late = Link(can_replay=False)
    late.engine.prompt(PROMPT)
    late.lose()
    late.engine.prompt([*PROMPT, 1, 2, 3, 4])
    late.rank.begin()
    late.settle()
    assert late.rank.state is State.PARTIAL
    fresh = Link(can_replay=False)
    fresh.rank.begin()
    fresh.engine.prompt(PROMPT)
    fresh.settle()
    assert fresh.rank.state is State.LIVE


def test_a_cleared_cache_makes_a_partial_rank_exact_again() -> None:
    link = Link(ring=1)
    link.engine.prompt(PROMPT)
    link.engine.prompt([9, 9, 9, 9])
    link.lose()
    link.rank.begin()
    link.settle()
    assert link.rank.state is State.PARTIAL
    link.engine.clear()
    link.engine.prompt(PROMPT)
    link.settle()
    assert link.rank.exact
    assert link.matched(PROMPT) == 6


def test_a_gap_is_replayed() -> None:
    link = connected()
    link.engine.prompt(PROMPT)
    link.settle()
    link.engine.evict(0)
    link.lose()
    link.engine.prompt([7] * 8)
    link.settle()
    assert link.counts.gaps == 1
    assert link.rank.exact
    assert link.matched(PROMPT) == link.engine.matched(PROMPT)


def test_a_gap_that_cannot_be_filled_purges() -> None:
    link = connected(ring=1)
    link.engine.prompt(PROMPT)
    link.settle()
    link.engine.evict(0)
    link.lose()
    link.engine.prompt([7] * 8)
    link.settle()
    assert link.rank.state is State.PARTIAL
    assert link.matched(PROMPT) == 0
    assert link.matched([7] * 8) == 2


def test_a_gap_without_replay_purges() -> None:
    link = Link(can_replay=False)
    link.rank.begin()
    link.engine.prompt(PROMPT)
    link.settle()
    link.engine.evict(0)
    link.lose()
    link.engine.prompt([7] * 8)
    link.settle()
    assert link.rank.state is State.PARTIAL
    assert (link.matched(PROMPT), link.matched([7] * 8)) == (0, 2)


def test_a_fallen_number_is_a_restart() -> None:
    link = connected()
    link.engine.prompt(PROMPT)
    link.settle()
    link.engine.restart()
    link.engine.prompt([7] * 8)
    link.settle()
    assert link.counts.restarts == 1
    assert link.rank.exact
    assert (link.matched(PROMPT), link.matched([7] * 8)) == (0, 2)


def test_a_restart_that_overtook_our_numbers_is_found_by_the_replay() -> None:
    link = connected()
    link.engine.prompt(PROMPT)
    link.engine.evict(3)
    link.settle()
    link.engine.restart()
    for start in range(5):
        link.engine.prompt([50 + start] * 8)
    link.lose()
    link.engine.prompt([60] * 8)
    link.settle()
    assert link.rank.exact
    assert link.matched(PROMPT) == 0
    assert all(link.matched([50 + start] * 8) == 2 for start in range(5))


def test_messages_that_the_replay_told_already_are_dropped() -> None:
    link = Link()
    link.engine.prompt(PROMPT)
    link.engine.prompt([7] * 8)
    link.rank.begin()
    link.replay()
    link.deliver()
    link.settle()
    assert link.counts.duplicates == 2
    assert link.rank.exact


def test_a_batch_that_cannot_be_read_is_counted_and_makes_the_rank_partial() -> None:
    link = connected()
    link.rank.message(0, b"\xc1")
    link.settle()
    assert link.counts.unreadable == 1
    assert link.rank.state is State.PARTIAL


def test_an_engine_that_does_not_answer_is_partial_after_the_first_gap_only() -> None:
    link = Link()
    link.rank.begin()
    link.rank.wants = None
    link.rank.replay_failed()
    assert link.rank.state is State.WAITING
    link.engine.prompt(PROMPT)
    link.deliver()
    while link.rank.step():
        pass
    assert link.rank.exact
    assert link.matched(PROMPT) == 6


def test_a_restart_behind_a_broken_connection_is_found_at_once() -> None:
    link = connected()
    for start in range(5):
        link.engine.prompt([50 + start] * 8)
    link.settle()
    link.engine.restart()
    link.engine.prompt(PROMPT)
    link.lose()
    link.rank.reconnected()
    link.settle()
    assert link.rank.exact
    assert (link.matched([50] * 8), link.matched(PROMPT)) == (0, 6)


def test_restart_told_by_the_metrics_purges_and_asks_again() -> None:
    link = connected()
    link.engine.prompt(PROMPT)
    link.settle()
    link.rank.restarted()
    assert not link.rank.exact
    link.settle()
    assert link.rank.exact
    assert link.matched(PROMPT) == 6


_WORDS = [[1] * 8, [1] * 8 + [2] * 12, [1] * 4 + [3] * 8, [4] * 16, [1] * 8 + [2] * 8 + [5] * 8]

_steps = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), st.integers(0, len(_WORDS) - 1)),
        st.tuples(st.just("copy"), st.integers(0, len(_WORDS) - 1)),
        st.tuples(st.just("evict"), st.integers(0, 50)),
        st.tuples(st.just("clear"), st.just(0)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("scraped restart"), st.just(0)),
        st.tuples(st.just("lose"), st.just(0)),
        st.tuples(st.just("deliver"), st.integers(1, 3)),
        st.tuples(st.just("replay"), st.just(0)),
        st.tuples(st.just("no answer"), st.just(0)),
        st.tuples(st.just("reconnect"), st.just(0)),
        st.tuples(st.just("step"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(_steps, st.sampled_from([2, 5, 1000]), st.booleans(), st.booleans())
def test_whatever_happens_an_exact_rank_equals_the_engine(
    steps: list[tuple[str, int]], ring: int, can_replay: bool, begun_late: bool
) -> None:
    link = Link(ring=ring, can_replay=can_replay)
    restarted = False
    if not begun_late:
        link.rank.begin()
    for what, number in steps:
        if what == "prompt":
            link.engine.prompt(_WORDS[number])
        elif what == "copy":
            link.engine.prompt(_WORDS[number], copy=True)
        elif what == "evict":
            link.engine.evict(number)
        elif what == "clear":
            link.engine.clear()
        elif what == "restart":
            link.lose()
            link.engine.restart()
            restarted = True
        elif what == "scraped restart":
            link.rank.restarted()
        elif what == "lose":
            if link.engine.sent and restarted:
                # A new life whose lost messages end just below the expected number looks like the old one:
                # only the metrics tell.
                link.rank.restarted()
            link.lose()
        elif what == "deliver":
            link.deliver(number)
        elif what == "replay":
            link.replay()
        elif what == "reconnect":
            link.rank.reconnected()
        elif what == "no answer":
            link.rank.wants = None
            link.rank.replay_failed()
        else:
            link.rank.step()
    if begun_late:
        link.rank.begin()
        link.replay()
    link.engine.prompt([8] * BLOCK)
    link.engine.evict(0)
    link.settle()
    for tokens in _WORDS:
        told = link.matched(tokens)
        if link.rank.exact:
            assert told == link.engine.matched(tokens)
        else:
            assert told <= link.engine.matched(tokens)
    if can_replay and ring == 1000 and not any(what == "no answer" for what, _ in steps):
        assert link.rank.exact


@pytest.mark.parametrize("count", [1, 3])
def test_an_endpoint_of_several_ranks_counts_their_mean(count: int) -> None:
    index = PreciseIndex()
    links = [Link(index=index) for _ in range(count)]
    for link in links:
        link.rank.begin()
        link.settle()
    links[0].engine.prompt(PROMPT)
    links[0].settle()
    assert links[0].matched(PROMPT) == pytest.approx(6 / count)


def test_a_message_of_many_events_is_taken_in_slices() -> None:
    index = PreciseIndex()
    rank = Rank(index, 0, RankCounts(), can_replay=False)
    rank.message(0, batch(*(["BlockStored", [name], None, [name] * 4, 4] for name in range(100)), ["Other"]))
    steps = 1
    while rank.step():
        steps += 1
    assert (steps, len(rank.shelf.names), index.counts.unknown) == (102, 100, 1)
