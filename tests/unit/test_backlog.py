"""The backlog: what was given to an endpoint and is not prefilled yet."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from extproc.engines.state import EngineState
from extproc.fleet.backlog import STEP_TOKENS, Backlog

RATE = 1000.0


def scrape(at: float, first: float | None = None, computed: float | None = None) -> EngineState:
    return EngineState(at=at, first_tokens_total=first, computed_prompt_tokens_total=computed)


def test_it_leaks_at_the_prefill_rate() -> None:
    backlog = Backlog()
    backlog.add(3000, now=0.0, rate=RATE)
    assert backlog.tokens(1.0, RATE) == 2000
    assert backlog.tokens(9.0, RATE) == 0


def test_leases_that_end_take_their_tokens_along() -> None:
    backlog = Backlog()
    backlog.add(3000, 0.0, RATE)
    backlog.add(500, 0.0, RATE)
    backlog.remove(3000, 0.1, RATE)
    assert backlog.tokens(0.1, RATE) == 500
    backlog.remove(500, 0.1, RATE)
    assert (backlog.tokens(0.1, RATE), backlog.charged, backlog.unstarted) == (0, 0, 0)


def test_first_tokens_prove_that_the_oldest_are_done() -> None:
    backlog = Backlog()
    for _ in range(4):
        backlog.add(10_000, 0.0, rate=1.0)
    backlog.observe(scrape(1.0, first=3), scrape(0.0, first=0), 1.0, rate=1.0)
    assert backlog.unstarted == 1
    assert backlog.tokens(1.0, 1.0) == 10_000
    assert not backlog.estimated


def test_no_first_tokens_prove_that_the_leak_ran_ahead() -> None:
    backlog = Backlog()
    for _ in range(4):
        backlog.add(10_000, 0.0, RATE)
    backlog.observe(scrape(30.0, first=7), scrape(29.0, first=7), 30.0, RATE)
    assert backlog.tokens(30.0, RATE) == 30_000


def test_a_leaked_level_within_what_counters_allow_is_kept() -> None:
    backlog = Backlog()
    backlog.add(10_000, 0.0, RATE)
    backlog.observe(scrape(4.0, first=0), scrape(3.0, first=0), 4.0, RATE)
    assert backlog.tokens(4.0, RATE) == 6000


def test_a_lease_that_ended_before_the_scrape_explains_its_own_first_token() -> None:
    backlog = Backlog()
    backlog.add(100, 0.0, rate=1.0)
    backlog.add(20_000, 0.0, rate=1.0)
    backlog.remove(100, 0.5, rate=1.0)
    backlog.observe(scrape(1.0, first=1), scrape(0.0, first=0), 1.0, rate=1.0)
    assert backlog.unstarted == 1


def test_equal_leases_that_end_after_a_scrape_do_not_take_the_waiting_ones_along() -> None:
    backlog = Backlog()
    for _ in range(100):
        backlog.add(5_000, 0.0, rate=1.0)
    backlog.observe(scrape(1.0, first=50), scrape(0.0, first=0), 1.0, rate=1.0)
    for _ in range(50):
        backlog.remove(5_000, 1.0, rate=1.0)
    assert backlog.unstarted == 50
    assert backlog.charged == 250_000


def test_computed_tokens_stand_in_for_first_tokens() -> None:
    backlog = Backlog()
    for _ in range(4):
        backlog.add(10_000, 0.0, rate=1.0)
    backlog.observe(scrape(1.0, computed=35_000), scrape(0.0, computed=0), 1.0, rate=1.0)
    assert backlog.tokens(1.0, 1.0) == 5_000
    assert not backlog.estimated


def test_without_counters_it_is_only_estimated() -> None:
    backlog = Backlog()
    backlog.add(3000, 0.0, RATE)
    backlog.observe(scrape(1.0), scrape(0.0), 1.0, RATE)
    assert backlog.estimated
    assert backlog.tokens(1.0, RATE) == 2000


def test_a_counter_that_stands_still_while_requests_end_is_not_believed() -> None:
    backlog = Backlog()
    for second in range(1, 8):
        backlog.add(50_000, float(second), RATE)
        backlog.remove(50_000, second + 0.9, RATE)
        backlog.observe(scrape(second + 1.0, first=5), scrape(float(second), first=5), second + 1.0, RATE)
    backlog.add(10_000, 10.0, RATE)
    backlog.observe(scrape(30.0, first=5), scrape(29.0, first=5), 30.0, RATE)
    assert backlog.estimated
    assert backlog.tokens(30.0, RATE) == 0


def test_a_restart_or_garbage_changes_nothing_by_itself() -> None:
    backlog = Backlog()
    backlog.add(3000, 0.0, RATE)
    backlog.observe(scrape(1.0, first=math.nan), scrape(0.0, first=5), 1.0, RATE)
    backlog.observe(scrape(1.0, first=2), scrape(0.0, first=5), 1.0, RATE)
    backlog.observe(scrape(1.0, first=2), None, 1.0, RATE)
    assert backlog.tokens(1.0, RATE) == 2000


events = st.one_of(
    st.tuples(st.just("add"), st.sampled_from([0.0, 1.0, 100.0, 100.0, 5000.0, 60_000.0])),
    st.tuples(st.just("remove"), st.integers(0, 20)),
    st.tuples(st.just("first"), st.one_of(st.none(), st.integers(0, 10))),
    st.tuples(st.just("computed"), st.one_of(st.none(), st.integers(0, 100_000))),
)


@given(st.lists(st.tuples(events, st.floats(0.0, 5.0), st.floats(1.0, 1e6)), max_size=60))
def test_it_is_never_negative_nor_more_than_open_leases_explain(
    steps: list[tuple[tuple[str, float], float, float]],
) -> None:
    backlog, now, first, computed = Backlog(), 0.0, 0.0, 0.0
    open_leases: list[float] = []
    previous = scrape(0.0, 0.0, 0.0)
    for (kind, value), passed, rate in steps:
        now += passed
        if kind == "add":
            open_leases.append(value)
            backlog.add(value, now, rate)
        elif kind == "remove" and open_leases:
            backlog.remove(open_leases.pop(int(value) % len(open_leases)), now, rate)
        elif kind == "first":
            first += value or 0
            state = scrape(now, None if value is None else first, computed)
            backlog.observe(state, previous, now, rate)
            previous = state
        elif kind == "computed":
            computed += value or 0
            state = scrape(now, None, None if value is None else computed)
            backlog.observe(state, previous, now, rate)
            previous = state
        tokens = backlog.tokens(now, rate)
        assert 0 <= tokens <= backlog.charged <= sum(open_leases) + 1e-6
        assert backlog.unstarted <= len(open_leases)
        assert not math.isnan(tokens)


def test_a_step_of_tokens_is_what_counters_may_not_show_yet() -> None:
    backlog = Backlog()
    for _ in range(100):
        backlog.add(100, 0.0, RATE)
    backlog.observe(scrape(60.0, first=0), scrape(59.0, first=0), 60.0, RATE)
    assert backlog.tokens(60.0, RATE) == 10_000 - STEP_TOKENS


def test_work_and_tokens_are_told_apart() -> None:
    backlog = Backlog()
    for _ in range(200):
        backlog.add(3000, 0.0, RATE, tokens=1000)
    assert math.isclose(backlog.per_token, 3.0, rel_tol=0.01)


def run_with_counters_behind_by(lag: float) -> Backlog:
    """One request a second, each half a second of work; scrapes every second show first tokens ``lag`` seconds late."""
    backlog = Backlog()
    for now in range(200):
        shown, before = max(now - 1 - lag, 0), max(now - 2 - lag, 0)
        backlog.observe(scrape(now, first=int(shown)), scrape(now - 1, first=int(before)), now, RATE)
        backlog.add(500 + now / 1000, now, RATE)
        if now >= 10:
            # The request of ten seconds ago ended; its first token came a second after it was sent.
            backlog.remove(500 + (now - 10) / 1000, now, RATE, started_at=now - 9.0)
    return backlog


def test_the_lag_of_counters_is_learned_from_ends() -> None:
    assert run_with_counters_behind_by(0.0).lag < 1.5
    assert 3.5 < run_with_counters_behind_by(5.0).lag < 7.0


def test_late_counters_do_not_bind_the_level_from_below() -> None:
    late = run_with_counters_behind_by(5.0)
    assert late.unstarted >= 5
    assert late.tokens(200.0, RATE) == 0


def test_of_those_not_known_to_have_started_as_many_wait_as_work_is_left() -> None:
    backlog = Backlog()
    assert backlog.waiting(0.0) == 0.0
    for _ in range(4):
        backlog.add(1000, 0.0, RATE)
    assert backlog.waiting(backlog.tokens(0.0, RATE)) == 4.0
    assert backlog.waiting(backlog.tokens(3.0, RATE)) == 1.0
