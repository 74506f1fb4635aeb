"""Minimal health: exclusion after failures in a row, growing back-off, a gentle return."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.health import Health


def excluded(now: float = 0.0) -> Health:
    health = Health()
    for _ in range(3):
        health.failed(now)
    return health


def test_three_failures_in_a_row_exclude() -> None:
    health = Health()
    health.failed(0.0)
    health.failed(0.0)
    assert health.admits(0.0, leases=50)
    health.failed(0.0)
    assert not health.admits(0.5, leases=0)
    assert health.excluded(0.99)


def test_a_success_between_failures_clears_the_row() -> None:
    health = Health()
    for _ in range(10):
        health.failed(0.0)
        health.failed(0.0)
        health.succeeded(0.0)
    assert not health.excluded(0.0)


def test_the_return_is_gentle_one_then_two_then_four_requests() -> None:
    health = excluded()
    allowed = []
    for _ in range(3):
        allowed.append(max(n for n in range(1, 99) if health.admits(1.0, n - 1)))
        health.succeeded(1.0)
    assert allowed == [1, 2, 4]
    assert health.admits(1.0, leases=1000)


def test_a_failure_on_probation_excludes_again_for_twice_as_long() -> None:
    health = excluded()
    health.failed(1.0)
    assert health.excluded(2.9)
    assert not health.excluded(3.0)


def test_back_off_is_bounded() -> None:
    health = Health()
    now = 0.0
    for _ in range(40):
        health.failed(now)
        health.failed(now)
        health.failed(now)
        now = health.excluded_until
    assert health.excluded_until <= now
    before = now
    health.failed(before)
    assert health.excluded_until - before == 60.0


def test_failures_of_requests_already_under_way_do_not_prolong() -> None:
    health = excluded()
    until = health.excluded_until
    for _ in range(50):
        health.failed(0.5)
    assert health.excluded_until == until


def test_probation_ends_by_itself() -> None:
    health = excluded()
    assert health.admits(31.1, leases=500)


def test_an_unreachable_endpoint_returns_when_it_answers_a_scrape() -> None:
    health = Health()
    for _ in range(3):
        health.failed(0.0, unreachable=True)
    assert health.excluded(0.1)
    health.answered(0.2)
    assert health.admits(0.2, leases=0)
    assert not health.admits(0.2, leases=1)


def test_an_endpoint_that_fails_requests_does_not_return_by_a_scrape() -> None:
    health = excluded()
    health.answered(0.2)
    assert health.excluded(0.3)


@given(st.lists(st.tuples(st.sampled_from(["fail", "ok", "answer"]), st.floats(0, 5)), max_size=60))
def test_the_exclusion_never_ends_later_than_the_longest_back_off(events: list[tuple[str, float]]) -> None:
    health, now = Health(), 0.0
    for word, step in events:
        now += step
        {"fail": health.failed, "ok": health.succeeded, "answer": health.answered}[word](now)
        assert health.excluded_until <= now + health.max_backoff_s
        assert 0 <= health.trials_left <= health.probation
