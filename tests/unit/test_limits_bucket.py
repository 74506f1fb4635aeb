"""Buckets: bursts, debt, waiting times that hold, and the calendar day."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.limits.bucket import DAY_S, Bucket, DayBudget


def test_a_bucket_starts_full_and_refills_evenly() -> None:
    bucket = Bucket(60, 1.0, 0.0)
    bucket.add(-60, 0.0)
    assert bucket.left(0.0) == 0
    assert bucket.left(30.0) == 30
    assert bucket.left(1000.0) == 60


def test_the_wait_it_names_is_enough_and_not_too_long() -> None:
    bucket = Bucket(100, 100 / 60, 0.0)
    bucket.add(-80, 0.0)
    wait = bucket.wait_s(80, 0.0)
    assert wait == 36.0
    assert bucket.wait_s(80, wait) == 0.0
    assert bucket.wait_s(80, wait - 0.5) > 0.0


def test_more_than_the_bucket_holds_is_let_in_when_it_is_full_and_paid_afterwards() -> None:
    bucket = Bucket(100, 1.0, 0.0)
    assert bucket.wait_s(250, 0.0) == 0.0
    bucket.add(-250, 0.0)
    assert bucket.wait_s(1, 0.0) == 151.0


def test_a_changed_limit_keeps_what_was_used() -> None:
    bucket = Bucket(100, 1.0, 0.0)
    bucket.add(-40, 0.0)
    bucket.resize(200, 2.0, 0.0)
    assert bucket.left(0.0) == 160
    bucket.resize(50, 1.0, 0.0)
    assert bucket.left(0.0) == 10


STEP = st.tuples(st.floats(0, 30), st.floats(0.1, 300))


@given(st.lists(STEP, max_size=60), st.floats(1, 1000), st.floats(0.01, 50))
def test_never_more_passes_than_the_burst_the_rate_and_one_request(
    steps: list[tuple[float, float]], capacity: float, rate: float
) -> None:
    bucket = Bucket(capacity, rate, 0.0)
    now = passed = largest = 0.0
    for elapsed, cost in steps:
        now += elapsed
        if bucket.wait_s(cost, now) == 0.0:
            bucket.add(-cost, now)
            passed += cost
            largest = max(largest, cost)
        assert passed <= capacity + rate * now + largest + 1e-3
        assert bucket.left(now) <= capacity


@given(st.lists(STEP, min_size=1, max_size=40), st.floats(1, 1000), st.floats(0.01, 50))
def test_who_comes_back_when_told_is_let_in(
    steps: list[tuple[float, float]], capacity: float, rate: float
) -> None:
    bucket = Bucket(capacity, rate, 0.0)
    now = 0.0
    for elapsed, cost in steps:
        now += elapsed
        now += bucket.wait_s(cost, now)
        assert bucket.wait_s(cost, now) == 0.0
        bucket.add(-cost, now)


def test_a_day_starts_anew_at_midnight_utc() -> None:
    budget = DayBudget(100)
    evening = 20_000 * DAY_S + 86_000
    day = budget.take(100, evening)
    assert budget.wait_s(1, evening) == 400
    assert budget.wait_s(1, evening + 400) == 0.0
    # A request of yesterday gives nothing back to today.
    budget.take(50, evening + 400)
    budget.give(30, day)
    assert budget.left(evening + 400) == 50
