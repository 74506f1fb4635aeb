"""Expected latency: the cost terms, and what their sum does with warm caches, bursts, and engines that say
nothing."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.api.request import Prompt
from extproc.fleet.endpoint import Endpoint
from extproc.fleet.model_stats import ModelStats
from extproc.kvcache.approximate import ApproximateIndex
from extproc.kvcache.view import CacheView
from extproc.scheduling.cost import DELAYED
from extproc.scheduling.strategies.expected_latency import ExpectedLatency
from extproc.scheduling.strategy import Candidate, Query
from tests.unit.scheduling_parts import endpoint, fleet, order, query, scraped


def terms(
    target: Endpoint, asked: Query, matched: int = 0, now: float = 0.0, peers: tuple[Endpoint, ...] = ()
) -> dict[str, float]:
    """The terms of one endpoint by name."""
    strategy = ExpectedLatency()
    candidates = [Candidate(target, matched), *(Candidate(each) for each in peers)]
    choice = next(each for each in strategy.rank(asked, candidates, now) if each.endpoint is target)
    return dict(zip(strategy.terms, choice.terms, strict=True))


def give(target: Endpoint, tokens: float, now: float = 0.0) -> None:
    """A lease with this many uncached tokens."""
    target.leases += 1
    target.backlog.add(tokens, now, target.rates.prefill_at(now))


def test_queue_and_prefill_are_tokens_over_rate() -> None:
    target = endpoint(0)
    target.backlog.add(4000, 0.0, 8000.0)
    found = terms(target, query(prompt=2000), matched=1200)
    assert found["queue s"] == pytest.approx(0.5)
    assert found["prefill s"] == pytest.approx(0.1)


def test_matches_count_by_how_far_usage_confirms_them() -> None:
    target = endpoint(0)
    for _ in range(60):
        target.rates.observe_match(4000, 2000, 0.0)
    assert terms(target, query(prompt=2000), matched=2000)["prefill s"] == pytest.approx(0.125, rel=0.02)


def test_decode_is_output_times_slowdown_times_streams_at_a_weight() -> None:
    target = endpoint(0, leases=10)
    assert terms(target, query(output=1000))["decode s"] == pytest.approx(0.3 * 1000 * 0.0002 * 10)


def test_stall_is_what_running_streams_lose_to_the_prefill() -> None:
    target = endpoint(0, leases=10)
    assert terms(target, query(prompt=8000))["stall s"] == pytest.approx(0.03 * 1.0 * 10)
    assert terms(target, query(prompt=8000), matched=8000)["stall s"] == 0.0


def test_strangers_in_the_queue_cost_completions() -> None:
    target = scraped(endpoint(0, leases=2), waiting=4.0, running=2.0)
    assert terms(target, query())["slots s"] == pytest.approx(4 * 4.0 / 2)


def test_our_own_unstarted_requests_are_not_counted_twice() -> None:
    target = endpoint(0)
    for _ in range(4):
        give(target, 100)
    scraped(target, waiting=4.0, running=0.0)
    assert terms(target, query())["slots s"] == 0.0


def test_a_prompt_that_does_not_fit_waits_for_completions() -> None:
    target = scraped(
        endpoint(0, leases=10), waiting=0.0, running=10.0, kv_usage=0.8, kv_blocks=1000, block_size=16
    )
    assert terms(target, query(prompt=3000))["slots s"] == 0.0
    short = 16_000 * 0.2 + 2560
    assert terms(target, query(prompt=int(short)))["slots s"] == pytest.approx(2 * 4.0 / 10)


def test_a_place_is_waited_for_while_the_prompts_ahead_are_computed() -> None:
    target = scraped(endpoint(0, leases=2), waiting=4.0, running=2.0)
    target.backlog.add(24_000, 0.0, 8000.0)
    found = terms(target, query())
    assert (found["queue s"], found["slots s"]) == (pytest.approx(3.0), pytest.approx(4 * 4.0 / 2 - 3.0))


def test_there_is_no_pressure_where_the_room_is_known() -> None:
    target = scraped(endpoint(0), running=1.0, kv_usage=0.99, kv_blocks=1000, block_size=16)
    assert terms(target, query(prompt=10))["pressure s"] == 0.0


def test_while_an_engine_hangs_its_queue_lasts_as_long_again() -> None:
    target = endpoint(0, leases=1)
    page = {"running": 1.0, "generation_tokens_total": 5.0, "counts_steps": True}
    scraped(target, **page)
    assert terms(target, query(), now=1.0)["queue s"] == pytest.approx(1.5)


def test_pressure_starts_at_nine_tenths_and_reaches_a_service_time_at_99_percent() -> None:
    assert terms(scraped(endpoint(0), kv_usage=0.89), query())["pressure s"] == 0.0
    assert terms(scraped(endpoint(0), kv_usage=0.99), query())["pressure s"] == pytest.approx(4.0)
    assert terms(scraped(endpoint(0), kv_usage=1.0), query())["pressure s"] < 12.0


def test_an_adapter_costs_where_it_is_not_resident() -> None:
    asked = query(adapter="sql")
    resident = scraped(endpoint(0), running_adapters=frozenset({"sql"}), max_lora=4)
    free = scraped(endpoint(1), running_adapters=frozenset({"x"}), max_lora=4)
    full = scraped(endpoint(2), running_adapters=frozenset({"x"}), max_lora=1)
    assert [terms(each, asked)["adapter s"] for each in (resident, free, full)] == [0.0, 0.5, 4.5]
    free.asked_for("sql")
    assert terms(free, asked)["adapter s"] == 0.0
    assert terms(free, query())["adapter s"] == 0.0


def test_adapters_last_asked_for_are_resident_however_old_the_scrape() -> None:
    target = scraped(endpoint(0), running_adapters=frozenset(), max_lora=2)
    for name in "abc":
        target.asked_for(name)
    found = {name: terms(target, query(adapter=name))["adapter s"] for name in "abc"}
    assert (found["a"] > 0.0, found["b"], found["c"]) == (True, 0.0, 0.0)


def test_a_place_is_waited_for_while_our_own_leases_use_them_all() -> None:
    target = scraped(endpoint(0), running_adapters=frozenset(), max_lora=1)
    asked = query(adapter="new")
    target.asked_for("old")
    target.adapter_leased("old", 2)
    assert terms(target, asked)["adapter s"] == pytest.approx(0.5 + 4.0 * 1.5)
    target.adapter_leased("old", -2)
    assert terms(target, asked)["adapter s"] == pytest.approx(0.5)
    assert target.adapter_leases == {}


def test_adapters_get_their_places_in_the_order_in_which_they_became_active() -> None:
    target = scraped(endpoint(0), running_adapters=frozenset(), max_lora=2)
    for name in ("first", "second", "third"):
        target.asked_for(name)
        target.adapter_leased(name, 1)
    found = {name: terms(target, query(adapter=name))["adapter s"] for name in ("first", "second", "third")}
    assert found == {"first": 0.0, "second": 0.0, "third": pytest.approx(4.0)}
    target.adapter_leased("first", -1)
    assert terms(target, query(adapter="third"))["adapter s"] == 0.0


def test_an_old_scrape_that_shows_an_adapter_running_does_not_give_it_a_place() -> None:
    target = scraped(endpoint(0), running_adapters=frozenset({"gone"}), max_lora=1)
    target.asked_for("gone")
    target.asked_for("other")
    target.adapter_leased("other", 1)
    assert terms(target, query(adapter="gone"))["adapter s"] > 4.0


def test_loading_an_adapter_holds_up_the_streams_there() -> None:
    target = scraped(endpoint(0, leases=10), running_adapters=frozenset(), max_lora=4)
    assert terms(target, query(adapter="sql"))["adapter s"] == pytest.approx(0.5 * (1 + 10 * 0.03))


def test_where_requests_wait_uncached_work_counts_for_those_behind_it() -> None:
    idle = terms(endpoint(0), query(prompt=8000))["prefill s"]
    busy = endpoint(0)
    for _ in range(7):
        give(busy, 100)
    assert terms(busy, query(prompt=8000))["prefill s"] == pytest.approx(idle * (1 + DELAYED * 6))


def test_work_that_need_not_be_done_delays_those_who_wait_in_the_gateway() -> None:
    alone, queued = query(prompt=8000), query(prompt=8000, queued=2.0)
    one = terms(endpoint(0), alone)["prefill s"]
    assert terms(endpoint(0), queued)["prefill s"] == pytest.approx(one * (1 + 2 * DELAYED))
    many = query(prompt=8000, queued=500.0)
    assert terms(endpoint(0), many)["prefill s"] == pytest.approx(one * (1 + 8 * DELAYED))


def test_what_waits_does_not_make_a_slow_replica_slower_than_it_is() -> None:
    slow, fast = endpoint(0), endpoint(1)
    for at in range(12):
        slow.rates.observe_first_token(4000, 0.02 + 4000 / 1600, 0.0, at * 0.1)
    for each in (slow, fast):
        for _ in range(10):
            give(each, 100)
    own = [
        terms(each, query(prompt=8000), now=2.0, peers=(other,))
        for each, other in ((slow, fast), (fast, slow))
    ]
    apart = own[0]["prefill s"] - own[1]["prefill s"]
    assert apart == pytest.approx(8000 / slow.rates.prefill - 8000 / fast.rates.prefill, rel=0.01)


def test_unknown_counts_as_the_mean_of_the_known() -> None:
    unknown, busy, idle = endpoint(0), scraped(endpoint(1), kv_usage=0.99), scraped(endpoint(2), kv_usage=0.1)
    assert terms(unknown, query(), peers=(busy, idle))["pressure s"] == pytest.approx(2.0)


def test_old_scrapes_fade_and_with_all_of_them_stale_leases_decide() -> None:
    busy, idle = scraped(endpoint(0), kv_usage=0.99), endpoint(1, leases=3)
    assert (
        order(ExpectedLatency(), [busy, idle], now=0.0) == "ba" or terms(busy, query())["pressure s"] == 4.0
    )
    assert terms(busy, query(), now=100.0)["pressure s"] == 0.0
    assert order(ExpectedLatency(), [busy, idle], now=100.0) == "ab"


def test_equals_go_by_leases_then_rotation() -> None:
    endpoints = fleet(3)
    endpoints[0].leases = 1
    endpoints[1].tick = 7
    endpoints[2].tick = 3
    assert order(ExpectedLatency(), endpoints, query(output=0)) == "cba"


numbers = st.one_of(
    st.none(), st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1), st.floats(0, 500)
)


@given(
    data=st.data(),
    prompt=st.integers(0, 10**6),
    output=st.integers(0, 10**6),
    backlog=st.floats(0, 1e7),
    leases=st.integers(0, 1000),
)
def test_terms_are_finite_and_never_negative(
    data: st.DataObject, prompt: int, output: int, backlog: float, leases: int
) -> None:
    endpoints = fleet(3)
    for each in endpoints:
        each.leases = leases
        each.backlog.add(backlog, 0.0, 8000.0)
        values = {
            name: data.draw(numbers)
            for name in ("waiting", "running", "kv_usage", "computed_prompt_tokens_total")
        }
        scraped(each, **values, kv_blocks=data.draw(st.sampled_from([None, 0, 10, 10**6])), block_size=16)
    candidates = [Candidate(each, data.draw(st.integers(0, prompt))) for each in endpoints]
    for choice in ExpectedLatency().rank(query(prompt, output), candidates, data.draw(st.floats(0, 50))):
        assert all(0 <= value < math.inf for value in choice.terms)
        assert choice.cost == pytest.approx(sum(choice.terms))


@given(
    backlog=st.floats(0, 1e6),
    more=st.floats(0, 1e6),
    matched=st.integers(0, 5000),
    better=st.integers(0, 5000),
)
def test_cost_grows_with_backlog_and_with_uncached_tokens(
    backlog: float, more: float, matched: int, better: int
) -> None:
    def cost(tokens: float, held: int) -> float:
        target = endpoint(0, leases=3)
        target.backlog.add(tokens, 0.0, 8000.0)
        return ExpectedLatency().rank(query(prompt=10_000), [Candidate(target, held)], 0.0)[0].cost

    assert cost(backlog + more, matched) >= cost(backlog, matched)
    assert cost(backlog, matched + better) <= cost(backlog, matched)


class Gateway:
    """Decisions with cache and backlog, no engine: nothing is prefilled but by the leak."""

    def __init__(self, replicas: int) -> None:
        self.endpoints = fleet(replicas)
        self.view = CacheView(ApproximateIndex(), ModelStats(), seed=3)
        self.strategy = ExpectedLatency()
        self.tick = 0

    def send(self, prompt: bytes, now: float, output: int = 200) -> Endpoint:
        look = self.view.look(Prompt((prompt,), size=len(prompt)), "llama")
        held = self.view.match(look)
        candidates = [Candidate(each, held.get(each.slot, 0)) for each in self.endpoints]
        best = self.strategy.rank(query(look.prompt_tokens, output), candidates, now)[0]
        chosen = best.endpoint
        self.tick += 1
        chosen.tick = self.tick
        give(chosen, look.prompt_tokens - best.matched_tokens, now)
        self.view.claim(chosen, look)
        return chosen

    def end_all(self) -> None:
        for each in self.endpoints:
            each.leases = 0
            each.backlog = type(each.backlog)()


def test_a_follow_up_goes_where_its_history_is() -> None:
    gateway, rng = Gateway(4), random.Random(1)
    histories = [rng.randbytes(8000) for _ in range(8)]
    homes = [gateway.send(history, 0.0) for history in histories]
    gateway.end_all()
    for history, home in zip(histories, homes, strict=True):
        assert gateway.send(history + rng.randbytes(800), 30.0) is home


@pytest.mark.parametrize("size", [40, 1200, 24_000, 200_000])
def test_800_equal_prompts_at_once_spread_over_8_equal_replicas(size: int) -> None:
    gateway, prompt = Gateway(8), random.Random(1).randbytes(size)
    counts = Counter(gateway.send(prompt, 0.0).slot for _ in range(800))
    assert max(counts.values()) <= 1.25 * 100


def test_a_short_shared_system_prompt_does_not_gather_traffic() -> None:
    gateway, rng = Gateway(8), random.Random(1)
    system = rng.randbytes(1200)
    counts = Counter(gateway.send(system + rng.randbytes(1600), at * 0.01).slot for at in range(400))
    assert len(counts) == 8
    assert max(counts.values()) <= 1.25 * 50


def test_a_hot_prefix_spills_when_waiting_costs_more_than_computing_it_again_and_not_before() -> None:
    hot = random.Random(1).randbytes(24_000)
    gateway = Gateway(2)
    home = gateway.send(hot, 0.0)
    gateway.end_all()
    home.backlog.add(5000, 0.0, 8000.0)
    assert gateway.send(hot + b"q" * 400, 0.0, output=0) is home
    gateway.end_all()
    home.backlog.add(7000, 0.0, 8000.0)
    assert gateway.send(hot + b"q" * 400, 0.0, output=0) is not home


def test_a_five_times_slower_replica_gets_about_a_fifth_and_its_share_back_after_it_recovered() -> None:
    def share_of_slow(gateway: Gateway, now: float) -> float:
        counts = Counter(gateway.send(rng.randbytes(8000), now).slot for at in range(400))
        gateway.end_all()
        return counts[0] / 400

    gateway, rng = Gateway(4), random.Random(1)
    slow = gateway.endpoints[0].rates
    for each in gateway.endpoints:
        each.rates.learn_prior(8000.0, -40.0)
    for at in range(12):
        slow.observe_first_token(4000, 0.02 + 4000 / 1600, 0.0, at * 2.6 - 30.0)
    assert 0.02 < share_of_slow(gateway, 2.0) < 0.12
    for at in range(12):
        slow.observe_first_token(4000, 0.02 + 4000 / 8000, 0.0, 5 + at * 0.6)
    assert share_of_slow(gateway, 12.0) == pytest.approx(0.25, abs=0.02)


def test_long_answers_to_one_cached_prompt_are_balanced() -> None:
    gateway, prompt = Gateway(4), random.Random(1).randbytes(2000)
    for _ in range(4):
        gateway.send(prompt, 0.0)
    gateway.end_all()
    counts = Counter(gateway.send(prompt, 60.0 + at, output=2000).slot for at in range(40))
    assert set(counts.values()) == {10}
