"""What is learned of an endpoint: speeds, windows of outcomes, sizes of a model's tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.engines.state import EngineState
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.fleet.model_stats import ModelStats
from extproc.fleet.noise import beyond_noise
from extproc.fleet.pace import PRIOR_SLOPE, Pace, slope_of
from extproc.fleet.peers import share
from extproc.fleet.rates import Rates
from extproc.fleet.strangers import Strangers
from extproc.fleet.windows import Stats
from extproc.outcome import Outcome
from tests.unit.core_parts import core, spec


def informed() -> Rates:
    """An endpoint of a fleet that has measured 8,000 tokens a second."""
    rates = Rates(8000.0)
    rates.learn_prior(8000.0, 0.0)
    return rates


def teach(rates: Rates, true_rate: float, now: float = 0.0, samples: int = 12) -> None:
    """One prompt after another, the last first token a second after ``now``."""
    ttft = 0.02 + 4000 / true_rate
    for number in range(samples):
        rates.observe_first_token(4000, ttft, 0.0, now + 1.0 - (samples - 1 - number) * ttft)


def test_requests_that_waited_for_one_hiccup_are_one_sample() -> None:
    rates = informed()
    teach(rates, 8000.0, samples=4)
    for at in range(12):
        rates.observe_first_token(4000, 6.0 - at * 0.1, 0.0, 8.0, 7.0 + at * 0.01)
    assert rates.prefill_at(8.0) == pytest.approx(8000, rel=0.1)


def test_without_samples_the_prior_holds() -> None:
    assert Rates(8000.0).prefill_at(100.0) == 8000.0


def test_a_much_slower_engine_is_found_out() -> None:
    rates = informed()
    teach(rates, 1600.0)
    assert rates.prefill_at(2.0) == pytest.approx(1600, rel=0.35)


def test_a_few_slow_outliers_do_not_matter() -> None:
    rates = informed()
    teach(rates, 8000.0, samples=9)
    for _ in range(3):
        rates.observe_first_token(4000, 30.0, 0.0, 1.0)
    assert rates.prefill_at(2.0) == pytest.approx(8000, rel=0.1)


def test_differences_like_noise_are_not_acted_on() -> None:
    rates = informed()
    teach(rates, 7000.0)
    assert rates.prefill_at(2.0) == 8000.0


def test_an_endpoint_without_news_is_believed_to_be_as_fast_as_its_peers_again() -> None:
    rates = informed()
    teach(rates, 800.0)
    assert rates.prefill_at(2.0) < 1500
    assert rates.prefill_at(300.0) == 8000.0


def test_recovery_is_learned_from_new_samples() -> None:
    rates = Rates(8000.0)
    teach(rates, 800.0)
    teach(rates, 8000.0, now=10.0)
    assert rates.prefill_at(12.0) == pytest.approx(8000, rel=0.1)


def test_one_fast_sample_after_a_long_silence_ends_a_slow_reputation() -> None:
    rates = informed()
    teach(rates, 1600.0)
    rates.observe_first_token(4000, 0.02 + 4000 / 8000, 0.0, 90.0)
    assert rates.prefill_at(91.0) == 8000.0


def test_one_fast_sample_among_slow_ones_does_not() -> None:
    rates = informed()
    teach(rates, 1600.0)
    rates.observe_first_token(4000, 0.02 + 4000 / 8000, 0.0, 3.0)
    assert rates.prefill_at(3.0) < 4000.0


def test_a_request_that_mostly_waited_for_others_teaches_nothing() -> None:
    rates = Rates(8000.0)
    for _ in range(12):
        rates.observe_first_token(500, 60.0, 20_000, 0.0)
    assert rates.prefill_at(1.0) == 8000.0


def test_short_prompts_teach_the_overhead() -> None:
    rates = Rates(8000.0)
    for _ in range(12):
        rates.observe_first_token(10, 0.3, 0.0, 0.0)
    assert rates.overhead == pytest.approx(0.3)
    for _ in range(12):
        rates.observe_first_token(4000, 0.8, 0.0, 0.0)
    assert rates.measured == pytest.approx(8000, rel=0.01)


def test_counters_teach_only_while_the_engine_was_never_idle() -> None:
    rates = Rates(8000.0)
    for second in range(10):
        rates.observe_counters(500, 1.0, busy=False, now=float(second))
    assert rates.measured == 8000.0
    for second in range(40):
        rates.observe_counters(2000, 1.0, busy=True, now=float(second))
    assert rates.measured == 2000.0


def test_peers_are_the_prior_of_those_without_samples() -> None:
    fleet = [Rates(8000.0) for _ in range(4)]
    for rates in fleet[:3]:
        teach(rates, 30_000.0)
    share(fleet, 8000.0, 2.0)
    assert fleet[3].prefill_at(3.0) == pytest.approx(30_000, rel=0.01)
    share(fleet, 8000.0, 1000.0)
    assert fleet[3].prefill_at(1001.0) == 8000.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1, 1e4), st.floats(0, 1e6)), max_size=40))
def test_rates_are_always_positive_and_finite(samples: list[tuple[float, float, float]]) -> None:
    rates = Rates(8000.0)
    for at, (tokens, ttft, backlog) in enumerate(samples):
        rates.observe_first_token(tokens, ttft, backlog, float(at))
        rates.observe_completion(ttft, ttft / 2, backlog, float(at))
        rates.observe_decode(ttft, tokens, backlog, backlog)
        rates.observe_match(tokens, backlog, float(at))
        share([rates], None, float(at))
        for value in (
            rates.prefill_at(at + 1.0),
            rates.pace.slowdown,
            rates.overhead,
            rates.completion_interval(3) + 1e-9,
        ):
            assert 0 < value < math.inf
        assert 0 <= rates.match_trust(at + 1.0) <= 1


def test_matches_that_usage_denies_are_trusted_less_and_forgiven_later() -> None:
    rates = Rates(8000.0)
    for _ in range(40):
        rates.observe_match(4000, 1000, 0.0)
    assert rates.match_trust(0.0) == pytest.approx(0.25, abs=0.02)
    assert rates.match_trust(3600.0) > 0.95


def test_the_completion_interval_is_littles_law_until_gaps_are_known() -> None:
    rates = Rates(8000.0)
    assert rates.completion_interval(8) == pytest.approx(0.5)
    for number in range(20):
        rates.observe_completion(4.0, 0.1, active=8, now=number * 0.25)
    assert rates.completion_interval(8) == pytest.approx(0.25)


def test_decode_slope_is_found_under_varying_load() -> None:
    pace = Pace()
    for number in range(300):
        streams = 5.0 + number % 60
        pace.observe(0.010 + 0.0005 * streams, streams)
    assert slope_of([pace]) == pytest.approx(0.0005, rel=0.15)


def test_prefill_is_not_taken_for_slow_decoding() -> None:
    rates = Rates(10_000.0)
    rates.observe_decode(1.0, generated_tokens=500, computed_tokens=5000, running=10)
    assert rates.pace.level == pytest.approx(0.01)


def test_equal_endpoints_share_one_slope_and_a_slow_one_is_scaled() -> None:
    fleet = [Rates(8000.0) for _ in range(4)]
    for number in range(60):
        for rates, factor in zip(fleet, (1.0, 1.1, 0.9, 5.0), strict=True):
            streams = 10.0 + number % 7
            rates.pace.observe(factor * (0.01 + PRIOR_SLOPE * streams), streams)
    share(fleet, None, 1.0)
    slopes = [rates.pace.slowdown for rates in fleet]
    assert slopes[0] == slopes[1] == slopes[2]
    assert slopes[3] > 3 * slopes[0]


@given(measured=st.floats(1e-6, 1e6), usual=st.floats(1e-6, 1e6))
def test_noise_is_cut_and_nothing_overshoots(measured: float, usual: float) -> None:
    result = beyond_noise(measured, usual)
    low, high = sorted((measured, usual))
    assert low * 0.999 <= result <= high * 1.001
    if 0.75 < measured / usual < 1.33:
        assert result == usual


def test_windows_forget_after_their_time() -> None:
    stats = Stats()
    stats.record(0.2, 1.0, 50, Outcome.SUCCESS, 0.0)
    assert stats.minute.ttft_s(30.0) == pytest.approx(0.2)
    assert stats.minute.ttft_s(70.0) is None
    assert stats.five_minutes.ttft_s(70.0) == pytest.approx(0.2)
    assert stats.five_minutes.ttft_s(400.0) is None


def test_success_counts_failures_and_leaves_out_neutral_ends() -> None:
    stats = Stats()
    for outcome in (Outcome.SUCCESS, Outcome.SUCCESS, Outcome.SUCCESS, Outcome.FAILURE, Outcome.NEUTRAL):
        stats.record(None, 1.0, None, outcome, 5.0)
    assert stats.minute.success(6.0) == 0.75
    assert stats.minute.ttft_s(6.0) is None


def test_a_quantile_is_right_to_an_eighth() -> None:
    stats = Stats()
    for number in range(1, 1001):
        stats.record(None, number / 100, 1, Outcome.SUCCESS, 5.0)
    assert stats.minute.duration_s(0.5, 6.0) == pytest.approx(5.0, rel=0.13)
    assert stats.minute.duration_s(0.99, 6.0) == pytest.approx(9.9, rel=0.13)
    assert stats.minute.tokens_per_s(6.0) == pytest.approx(1000 / 60)


@given(st.lists(st.tuples(st.floats(0, 1e7, allow_nan=False), st.floats(0, 2000)), max_size=50))
def test_any_duration_is_counted(entries: list[tuple[float, float]]) -> None:
    stats = Stats()
    now = 0.0
    for duration, passed in entries:
        now += passed
        stats.record(None, duration, None, Outcome.SUCCESS, now)
        assert stats.minute.duration_s(0.5, now) is not None


def test_model_numbers_start_from_priors_and_follow_usage() -> None:
    models = ModelStats()
    assert models.prompt_tokens("llama", 4000) == 1000
    assert models.output_tokens("llama") == 256
    assert models.output_tokens("llama", max_tokens=16) == 16
    for _ in range(300):
        models.observe("llama", prompt_bytes=3000, prompt_tokens=1000, output_tokens=80)
    assert models.bytes_per_token("llama") == pytest.approx(3.0, abs=0.05)
    assert models.output_tokens("llama", max_tokens=4096) == pytest.approx(80, abs=5)


def test_model_names_are_capped() -> None:
    models = ModelStats(max_models=10)
    for number in range(1000):
        models.observe(f"model-{number}", output_tokens=1)
    assert len(models) == 10


def scrape(at: float, **values: float | None) -> EngineState:
    return EngineState(at=at, **values)  # type: ignore[arg-type]


def test_waiting_requests_that_our_leases_explain_are_ours() -> None:
    strangers = Strangers()
    strangers.observe(scrape(1.0, waiting=5.0, running=3.0), None, leases=8, unstarted=5)
    assert (strangers.waiting, strangers.running) == (0.0, 0.0)


def test_strangers_count_once_two_scrapes_agree() -> None:
    strangers = Strangers()
    first, second = scrape(1.0, waiting=0.0), scrape(2.0, waiting=9.0)
    strangers.observe(first, None, 0, 0)
    strangers.observe(second, first, 0, 0)
    assert strangers.waiting == 0.0
    strangers.observe(scrape(3.0, waiting=7.0), second, 0, 0)
    assert strangers.waiting == 7.0


def test_slots_show_when_something_waits_and_running_stands_still() -> None:
    strangers = Strangers()
    first = scrape(1.0, waiting=2.0, running=32.0, generation_tokens_total=1.0)
    second = scrape(2.0, waiting=3.0, running=32.0, generation_tokens_total=2.0)
    strangers.observe(first, None, 34, 2)
    strangers.observe(second, first, 35, 3)
    assert strangers.slots == 32.0
    strangers.observe(scrape(3.0, waiting=0.0, running=40.0), second, 40, 0)
    assert strangers.slots is None


def test_a_frozen_page_says_nothing_after_a_while() -> None:
    strangers = Strangers()
    page = {"waiting": 50.0, "running": 8.0, "generation_tokens_total": 1000.0}
    previous = None
    for second in range(20):
        state = scrape(float(second), **page)
        strangers.observe(state, previous, 0, 0)
        previous = state
    assert strangers.waiting is None
    assert strangers.running is None


garbage = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


@given(st.lists(st.tuples(garbage, garbage, garbage), max_size=20))
def test_garbage_never_shows(states: list[tuple[float | None, float | None, float | None]]) -> None:
    endpoint = Endpoint(EndpointSpec("replica", "h:1", "pool"), 0)
    for second, (waiting, running, usage) in enumerate(states):
        state = scrape(
            float(second),
            waiting=waiting,
            running=running,
            kv_usage=usage,
            first_tokens_total=waiting,
            computed_prompt_tokens_total=running,
            generation_tokens_total=usage,
        )
        endpoint.observe(state, endpoint.state, float(second))
        strangers = endpoint.strangers
        for value in (strangers.waiting, strangers.running, strangers.slots, strangers.depth):
            assert value is None or 0 <= value < math.inf
        assert 0 < endpoint.rates.prefill_at(float(second)) < math.inf


def test_scrapes_older_than_three_intervals_count_less() -> None:
    endpoint = Endpoint(EndpointSpec("replica", "h:1", "pool"), 0)
    assert endpoint.trust(0.0) == 0.0
    endpoint.observe(scrape(10.0, waiting=0.0), None, 10.0)
    assert [endpoint.trust(now) for now in (10.5, 13.0, 17.5, 22.0, 90.0)] == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_adapters_asked_for_are_remembered_up_to_a_cap() -> None:
    endpoint = Endpoint(EndpointSpec("replica", "h:1", "pool"), 0)
    for number in range(1000):
        endpoint.asked_for(f"adapter-{number}")
    assert len(endpoint.adapters) == 64
    assert "adapter-999" in endpoint.adapters


def test_what_an_engine_computed_is_the_least_it_can_do() -> None:
    rates = informed()
    for at in range(12):
        rates.observe_least(30_000.0, at)
    assert rates.prefill_at(12.0) == pytest.approx(30_000, rel=0.2)
    known = rates.prefill
    rates.observe_least(2000.0, 12.5)
    assert rates.prefill == known


def test_a_request_that_waited_behind_a_guess_teaches_no_rate() -> None:
    rates = Rates(8000.0)
    for at in range(12):
        rates.observe_first_token(4000, 0.1, 2000.0, at * 0.1)
    assert rates.prefill_at(2.0) == 8000.0


def test_a_fleet_that_starts_learns_together() -> None:
    fleet = [Rates(8000.0) for _ in range(4)]
    for rates in fleet[:3]:
        teach(rates, 30_000.0, samples=1)
    share(fleet, 8000.0, 1.0)
    assert fleet[3].prefill_at(2.0) == pytest.approx(30_000, rel=0.01)


def test_the_step_of_a_prompt_is_the_lower_of_two_upper_bounds() -> None:
    rates = Rates(8000.0)
    assert rates.step_s == rates.overhead
    for _ in range(10):
        rates.pace.observe(0.3, 5.0)
    assert rates.step_s == rates.overhead
    for _ in range(200):
        rates.pace.observe(0.01, 5.0)
    assert rates.step_s == pytest.approx(0.01, rel=0.05)


def test_prompts_that_are_counted_when_they_are_done_do_not_make_decoding_look_slow() -> None:
    pace = Pace()
    for number in range(32):
        streams = 20.0 + number % 10
        lump = 0.200 if number % 4 == 0 else 0.0
        pace.observe(0.010 + 0.0005 * streams + lump, streams)
    assert pace.level == pytest.approx(0.0225, rel=0.1)
    assert slope_of([pace]) < 0.001


def test_the_endpoint_whose_load_varied_most_tells_the_slope_of_all() -> None:
    steady, varied = Pace(), Pace()
    for number in range(32):
        steady.observe(0.030 + 0.005 * (number % 2), 20.0 + number % 2)
        varied.observe(0.010 + 0.0005 * number, float(number))
    assert slope_of([steady, varied]) == pytest.approx(0.0005)


def test_before_a_fleet_has_measured_anything_its_endpoints_look_alike() -> None:
    fleet = [Rates(8000.0) for _ in range(3)]
    teach(fleet[0], 30_000.0, samples=1)
    share(fleet, 8000.0, 1.0)
    assert [rates.prefill_at(1.0) for rates in fleet] == [8000.0] * 3
    teach(fleet[1], 29_000.0, samples=2)
    share(fleet, 8000.0, 1.0)
    assert [rates.prefill_at(1.0) for rates in fleet] == [pytest.approx(29_000, rel=0.01)] * 3


def test_what_engines_did_is_their_prior_after_a_restart() -> None:
    before = core([spec("a"), spec("b")])
    for endpoint in before.fleet.endpoints.values():
        teach(endpoint.rates, 30_000.0, samples=3)
    before.housekeep(1.0)
    after = core([spec("a"), spec("b"), spec("c")])
    after.restore_speeds(before.speeds())
    after.housekeep(1.0)
    assert [e.rates.prefill_at(2.0) for e in after.fleet.endpoints.values()] == [
        pytest.approx(30_000, rel=0.1)
    ] * 3
    assert after.speeds() == before.speeds()


def test_a_night_without_requests_does_not_forget_what_the_engines_can_do() -> None:
    built = core([spec("a"), spec("b")])
    for endpoint in built.fleet.endpoints.values():
        teach(endpoint.rates, 30_000.0, samples=3)
    built.housekeep(1.0)
    built.housekeep(40_000.0)
    assert [e.rates.prefill_at(40_001.0) for e in built.fleet.endpoints.values()] == [
        pytest.approx(30_000, rel=0.1)
    ] * 2
    (rate, _) = built.speeds()["llama"]
    assert rate == pytest.approx(30_000, rel=0.1)


@pytest.mark.parametrize(
    "told", [(float("inf"), 1e-5), (float("nan"), 1e-5), (0.0, 1e-5), (8e3, float("inf"))]
)
def test_a_senseless_speed_of_an_earlier_run_is_not_taken(told: tuple[float, float]) -> None:
    built = core([spec("a")])
    built.restore_speeds({"llama": told})
    assert built.speeds() == {}
