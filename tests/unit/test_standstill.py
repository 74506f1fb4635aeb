"""An engine that hangs is seen by its counters, and nothing else is taken for it."""

from __future__ import annotations

from extproc.engines.state import EngineState
from extproc.fleet.backlog import Backlog
from extproc.fleet.standstill import Standstill


def page(at: float, generated: float, first: float = 3.0, *, steps: bool = True) -> EngineState:
    return EngineState(
        at=at,
        running=2.0,
        generation_tokens_total=generated,
        first_tokens_total=first,
        counts_steps=steps,
    )


def test_an_engine_that_makes_no_token_while_it_decodes_stands_still_as_long_again() -> None:
    standstill = Standstill()
    assert standstill.observe(page(1.0, 10), page(0.0, 10), decoding=1)
    assert standstill.seconds(1.5) == 1.5
    assert standstill.observe(page(2.0, 10), page(1.0, 10), decoding=1)
    assert standstill.seconds(2.5) == 2.5
    assert standstill.seconds(1000.0) == 30.0


def test_it_is_over_when_a_counter_moves() -> None:
    standstill = Standstill()
    standstill.observe(page(1.0, 10), page(0.0, 10), decoding=1)
    assert not standstill.observe(page(2.0, 11), page(1.0, 10), decoding=1)
    assert standstill.seconds(9.0) == 0.0


def test_without_a_stream_that_decodes_nothing_is_known() -> None:
    standstill = Standstill()
    assert not standstill.observe(page(1.0, 10), page(0.0, 10), decoding=0)
    assert standstill.seconds(9.0) == 0.0


def test_engines_that_count_at_the_end_of_requests_are_never_taken_to_hang() -> None:
    standstill = Standstill()
    assert not standstill.observe(page(1.0, 10, steps=False), page(0.0, 10, steps=False), decoding=2)


def test_counters_that_stand_still_while_requests_end_are_not_believed_until_they_move() -> None:
    standstill = Standstill()
    for at in range(1, 4):
        assert standstill.observe(page(3.0 * at, 10), page(3.0 * at - 1, 10), decoding=1)
        standstill.moved(3.0 * at + 0.5)
        assert standstill.seconds(3.0 * at + 0.6) == 0.0
    assert not standstill.observe(page(20.0, 10), page(19.0, 10), decoding=1)
    standstill.observe(page(21.0, 12), page(20.0, 10), decoding=1)
    assert standstill.observe(page(22.0, 12), page(21.0, 12), decoding=1)


def test_a_request_that_ended_since_the_last_scrape_says_that_it_moved() -> None:
    standstill = Standstill()
    standstill.moved(0.5)
    assert not standstill.observe(page(1.0, 10), page(0.0, 10), decoding=1)


def test_a_backlog_does_not_leak_while_the_engine_stands_still() -> None:
    backlog = Backlog()
    backlog.observe(page(0.0, 10), None, 0.0, 1000.0)
    backlog.add(800, 0.1, 1000.0)
    backlog.add(600, 0.2, 1000.0)
    assert backlog.tokens(2.0, 1000.0) == 0.0
    backlog.observe(page(2.0, 10), page(1.0, 10), 2.0, 1000.0, still=True)
    assert backlog.tokens(2.0, 1000.0) == 1400.0
