"""The circuit of one endpoint: what opens it, for how long, and how trust comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.health import Circuit, Health, HealthPolicy, Why


def excluded(now: float = 0.0) -> Health:
    health = Health()
    for _ in range(3):
        health.failed(now)
    return health


class TestFailuresInARow:
    def test_three_open_the_circuit(self) -> None:
        health = Health()
        health.failed(0.0)
        health.failed(0.0)
        assert health.admits(0.0, leases=50)
        health.failed(0.0)
        assert not health.admits(0.5, leases=0)
        assert health.excluded(0.99)
        assert (health.state(0.99), health.why) == (Circuit.OPEN, Why.FAILURES)

    def test_a_success_between_failures_clears_the_row(self) -> None:
        health = Health(HealthPolicy(error_share=1.0))
        for _ in range(10):
            health.failed(0.0)
            health.failed(0.0)
            health.succeeded(0.0)
        assert not health.excluded(0.0)

    def test_failures_of_requests_already_under_way_do_not_prolong(self) -> None:
        health = excluded()
        until = health.excluded_until
        for _ in range(50):
            health.failed(0.5)
        assert health.excluded_until == until

    def test_back_off_doubles_and_is_bounded(self) -> None:
        health, now, spans = excluded(), 0.0, []
        for _ in range(10):
            spans.append(health.excluded_until - now)
            now = health.excluded_until
            health.failed(now)
        assert spans == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


class TestTheErrorRate:
    def outcomes(self, health: Health, failures: int, successes: int, now: float) -> None:
        """Failures spread so that they never are in a row."""
        for number in range(successes):
            health.succeeded(now)
            if number >= successes - failures:
                health.failed(now)

    def test_above_a_tenth_opens_for_three_minutes(self) -> None:
        health = Health()
        self.outcomes(health, 5, 38, 0.0)
        assert health.why is Why.ERRORS
        assert health.excluded_until == 180.0

    def test_a_tenth_is_borne(self) -> None:
        health = Health()
        for _ in range(40):
            for _ in range(9):
                health.succeeded(0.0)
            health.failed(0.0)
        assert health.state(0.0) is Circuit.CLOSED

    def test_needs_enough_samples(self) -> None:
        health = Health()
        self.outcomes(health, 9, 10, 0.0)
        assert health.state(0.0) is Circuit.CLOSED
        health.failed(0.0)
        assert health.state(0.0) is Circuit.OPEN

    def test_old_outcomes_are_forgotten(self) -> None:
        health = Health()
        self.outcomes(health, 9, 10, 0.0)
        health.failed(130.0)
        assert health.state(130.0) is Circuit.CLOSED
        assert health.error_share(130.0) == 1.0

    def test_opens_longer_when_the_trial_fails(self) -> None:
        health = Health()
        self.outcomes(health, 5, 38, 0.0)
        health.failed(180.0)
        assert health.excluded_until - 180.0 == 360.0

    def test_a_long_good_time_forgets_the_growth(self) -> None:
        health = Health()
        self.outcomes(health, 5, 38, 0.0)
        self.outcomes(health, 0, 3, 200.0)
        assert health.state(200.0) is Circuit.CLOSED
        self.outcomes(health, 5, 38, 330.0)
        assert health.excluded_until - 330.0 == 180.0

    def test_the_next_opening_soon_after_is_longer(self) -> None:
        health = Health()
        self.outcomes(health, 5, 38, 0.0)
        self.outcomes(health, 0, 3, 200.0)
        self.outcomes(health, 5, 38, 250.0)
        assert health.excluded_until - 250.0 == 360.0

    def test_does_not_count_connections_that_could_not_be_made(self) -> None:
        health = Health(HealthPolicy(failures=1000))
        for _ in range(100):
            health.failed(0.0, connect=True)
        assert health.state(0.0) is Circuit.CLOSED
        assert health.error_share(0.0) is None


class TestComingBack:
    def test_is_gentle_one_then_two_then_four_requests(self) -> None:
        health = excluded()
        allowed = []
        for _ in range(3):
            assert health.state(1.0) is Circuit.HALF_OPEN
            allowed.append(max(n for n in range(1, 99) if health.admits(1.0, n - 1)))
            health.succeeded(1.0)
        assert allowed == [1, 2, 4]
        assert health.admits(1.0, leases=1000)
        assert health.state(1.0) is Circuit.CLOSED

    def test_a_failure_on_trial_opens_again_for_twice_as_long(self) -> None:
        health = excluded()
        health.failed(1.0)
        assert health.excluded(2.9)
        assert not health.excluded(3.0)

    def test_trial_ends_by_itself(self) -> None:
        assert excluded().admits(31.1, leases=500)

    def test_without_probation_it_is_trusted_at_once(self) -> None:
        health = Health(HealthPolicy(probation=0))
        for _ in range(3):
            health.failed(0.0)
        assert health.admits(1.0, leases=1000)
        health.succeeded(1.0)
        for _ in range(3):
            health.failed(2.0)
        assert health.excluded_until == 3.0

    def test_a_restarted_engine_is_tried_at_once_but_gently(self) -> None:
        health = Health()
        for number in range(38):
            health.succeeded(0.0)
            if number >= 33:
                health.failed(0.0)
        assert health.why is Why.ERRORS
        health.restarted(10.0)
        assert health.admits(10.0, leases=0)
        assert not health.admits(10.0, leases=1)
        assert health.error_share(10.0) is None


class TestReachability:
    def test_an_unreachable_endpoint_returns_when_it_answers_a_scrape(self) -> None:
        health = Health()
        for _ in range(3):
            health.failed(0.0, unreachable=True)
        assert health.evident(0.1)
        assert health.excluded(0.1)
        health.answered(0.2)
        assert health.admits(0.2, leases=0)
        assert not health.admits(0.2, leases=1)

    def test_an_endpoint_that_fails_requests_does_not_return_by_a_scrape(self) -> None:
        health = excluded()
        health.answered(0.2)
        assert health.excluded(0.3)
        assert not health.evident(0.3)

    def test_scrapes_that_time_out_beside_silence_open_until_one_is_answered(self) -> None:
        health = Health()
        health.answered(0.0)
        for now in range(1, 5):
            health.timed_out(float(now))
        assert health.state(4.0) is Circuit.CLOSED
        for now in range(5, 100):
            health.timed_out(float(now))
            assert health.state(now + 0.9) is Circuit.OPEN
        assert (health.why, health.opened) == (Why.SILENT, 1)
        health.answered(100.0)
        assert health.state(100.0) is Circuit.HALF_OPEN

    def test_an_engine_that_answers_requests_is_not_silent(self) -> None:
        health = Health()
        for now in range(60):
            health.timed_out(float(now))
            if now % 3 == 0:
                health.succeeded(float(now))
        assert health.state(60.0) is Circuit.CLOSED


class TestBusyAnswers:
    def test_never_open_the_circuit(self) -> None:
        health = Health()
        for now in range(200):
            health.busied(now / 10)
        assert health.state(20.0) is Circuit.CLOSED
        assert health.opened == 0

    def test_two_in_a_row_are_a_short_rest_that_grows(self) -> None:
        health = Health()
        health.busied(0.0)
        assert health.admits(0.0, leases=9)
        spans, now = [], 0.0
        for _ in range(6):
            health.busied(now)
            spans.append(health.busy_until - now)
            assert not health.admits(now, leases=0)
            now = health.busy_until
        assert spans == [0.5, 1, 2, 4, 5, 5]

    def test_a_success_ends_the_rest(self) -> None:
        health = Health()
        health.busied(0.0)
        health.busied(0.0)
        health.succeeded(0.1)
        assert health.admits(0.1, leases=9)


def test_new_bounds_keep_the_state() -> None:
    health = excluded()
    health.policy = HealthPolicy(backoff_s=10.0, max_backoff_s=10.0)
    assert health.excluded(0.9)
    health.failed(1.0)
    assert health.excluded_until == 11.0


EVENTS = ["fail", "connect", "refused", "ok", "answer", "busy", "timeout", "restart"]


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 30)), max_size=80), st.integers(0, 4))
def test_whatever_happens_every_exclusion_ends(events: list[tuple[str, float]], probation: int) -> None:
    policy = HealthPolicy(probation=probation)
    health, now = Health(policy), 0.0
    acts = {
        "fail": health.failed,
        "connect": lambda now: health.failed(now, connect=True),
        "refused": lambda now: health.failed(now, unreachable=True),
        "ok": health.succeeded,
        "answer": health.answered,
        "busy": health.busied,
        "timeout": health.timed_out,
        "restart": health.restarted,
    }
    for word, step in events:
        now += step
        acts[word](now)
        assert health.blocked_until() <= now + policy.max_open_s
        assert 0 <= health.trials_left <= probation
    later = health.blocked_until() + policy.probation_s
    assert health.admits(later, leases=10_000)
    assert health.state(later) is Circuit.CLOSED


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_an_endpoint_with_few_errors_keeps_its_requests(share: float) -> None:
    health = Health()
    for number in range(1, 1001):
        health.failed(number / 10) if share and number % int(1 / share) == 0 else health.succeeded(
            number / 10
        )
    assert health.opened == 0
