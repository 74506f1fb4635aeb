"""The classic strategies, each by what it promises, and the registry."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.fleet.endpoint import Endpoint
from extproc.outcome import Outcome
from extproc.scheduling.registry import NAMES, build
from extproc.scheduling.strategy import Candidate, Query, Strategy
from tests.unit.scheduling_parts import choose, endpoint, fleet, order, query, scraped


def made(name: str, **options: object) -> Strategy:
    return build(name, options, random.Random(1))


def shares(
    strategy: Strategy, endpoints: list[Endpoint], turns: int, asked: Query | None = None
) -> Counter[str]:
    """Decisions by endpoint; every request ends before the next."""
    counts: Counter[str] = Counter()
    for turn in range(turns):
        best = choose(strategy, endpoints, asked or query(), turn + 1)
        best.leases -= 1
        counts[best.spec.cluster] += 1
    return counts


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_strategy_ranks_every_candidate_once_with_its_terms(name: str) -> None:
    strategy = made(name)
    candidates = [Candidate(each) for each in fleet(5)]
    ranked = strategy.rank(query(affinity_key="k"), candidates, 1.0)
    assert sorted(choice.endpoint.slot for choice in ranked) == [0, 1, 2, 3, 4]
    assert all(len(choice.terms) == len(strategy.terms) for choice in ranked)


@pytest.mark.parametrize("name", sorted(NAMES))
@settings(max_examples=25)
@given(data=st.data())
def test_no_strategy_minds_missing_or_absurd_numbers(name: str, data: st.DataObject) -> None:
    number = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))
    endpoints = fleet(3)
    for each in endpoints:
        if data.draw(st.booleans()):
            values = {
                key: data.draw(number) for key in ("waiting", "running", "kv_usage", "first_tokens_total")
            }
            scraped(each, **values, kv_blocks=data.draw(st.sampled_from([None, 0, 1000])), block_size=16)
        each.leases = data.draw(st.integers(0, 50))
        if data.draw(st.booleans()):
            each.stats.record(
                data.draw(st.floats(0, 100)), data.draw(st.floats(0, 100)), 5, Outcome.SUCCESS, 0.0
            )
    asked = query(data.draw(st.integers(0, 10**6)), data.draw(st.integers(0, 10**5)), affinity_key="k")
    ranked = made(name).rank(asked, [Candidate(each) for each in endpoints], data.draw(st.floats(0, 1000)))
    assert len(ranked) == 3
    assert all(choice.cost == choice.cost for choice in ranked)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("no-such", {}, "no strategy is called"),
        ("round-robin", {"weight": 3}, "round-robin has no option weight"),
        ("consistent-hash", {"bound": 0.5}, "bound must be a number from 1"),
        ("consistent-hash", {"bound": "high"}, "bound must be a number"),
        ("weighted-score", {"weights": {"magic": 1}}, "no score magic"),
        ("weighted-score", {"weights": {"load": -1}}, "weights.load must be a number >= 0"),
        ("weighted-score", {"weights": {"load": 0}}, "needs a weight above 0"),
        ("weighted-split", {"weights": [1, 2]}, "weights must be a mapping"),
        ("weighted-split", {"within": "nope"}, "no strategy is called 'nope'"),
        ("expected-latency", {"tie_ms": float("nan")}, "tie_ms must be a number"),
    ],
)
def test_wrong_options_are_said_clearly(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made(name, **options)


def test_round_robin_takes_turns() -> None:
    strategy, endpoints = made("round-robin"), fleet(3)
    assert [choose(strategy, endpoints, query(), turn + 1).spec.cluster for turn in range(7)] == list(
        "abcabca"
    )


def test_weighted_round_robin_spreads_its_turns() -> None:
    strategy = made("weighted-round-robin")
    endpoints = [endpoint(0, weight=3.0), endpoint(1, weight=1.0)]
    turns = [choose(strategy, endpoints, query(), turn + 1).spec.cluster for turn in range(8)]
    assert "".join(turns) == "abaaabaa"


def test_weighted_split_keeps_the_shares() -> None:
    strategy = made("weighted-split", weights={"v1": 90, "v2": 10})
    endpoints = [endpoint(0, version="v1"), endpoint(1, version="v2")]
    counts = shares(strategy, endpoints, 2000)
    assert 0.07 < counts["b"] / 2000 < 0.13


def test_weighted_split_keeps_a_session_in_its_version() -> None:
    strategy = made("weighted-split", weights={"v1": 50, "v2": 50})
    endpoints = [endpoint(0, version="v1"), endpoint(1, version="v2")]
    for session in ("s1", "s2", "s3"):
        assert len(shares(strategy, endpoints, 20, query(affinity_key=session))) == 1


def test_weighted_split_gives_a_missing_versions_share_to_the_others() -> None:
    strategy = made("weighted-split", weights={"v1": 90, "v2": 10})
    assert shares(strategy, [endpoint(1, version="v2")], 5) == {"b": 5}


def test_least_requests_counts_leases_per_weight() -> None:
    endpoints = [endpoint(0, leases=4, weight=4.0), endpoint(1, leases=2, weight=1.0), endpoint(2, leases=9)]
    assert order(made("least-requests"), endpoints) == "abc"


def test_two_choices_never_take_the_busiest_of_three() -> None:
    endpoints = [endpoint(0, leases=1), endpoint(1, leases=2), endpoint(2, leases=50)]
    strategy = made("power-of-two-choices")
    firsts = {order(strategy, endpoints)[0] for _ in range(100)}
    assert firsts == {"a", "b"}


def test_random_follows_the_weights() -> None:
    counts = shares(
        made("random"), [endpoint(0, weight=3.0), endpoint(1, weight=1.0), endpoint(2, weight=0.0)], 2000
    )
    assert 0.7 < counts["a"] / 2000 < 0.8
    assert counts["c"] == 0


def test_consistent_hash_moves_only_the_keys_of_an_endpoint_that_goes() -> None:
    strategy, endpoints = made("consistent-hash"), fleet(5)
    keys = [f"user-{number}" for number in range(200)]
    before = {key: order(strategy, endpoints, query(affinity_key=key))[0] for key in keys}
    after = {key: order(strategy, endpoints[:4], query(affinity_key=key))[0] for key in keys}
    assert len(set(before.values())) == 5
    assert all(after[key] == before[key] for key in keys if before[key] != "e")


def test_consistent_hash_passes_over_an_endpoint_with_more_than_its_share() -> None:
    strategy, endpoints = made("consistent-hash", bound=1.25), fleet(4)
    counts = Counter(
        choose(strategy, endpoints, query(affinity_key="hot"), 1).spec.cluster for _ in range(100)
    )
    assert max(counts.values()) <= 33


def test_consistent_hash_keeps_a_session_on_an_idle_fleet_whose_last_request_is_not_yet_accounted() -> None:
    strategy, endpoints = made("consistent-hash", bound=1.25), fleet(4)
    first = choose(strategy, endpoints, query(affinity_key="session"), 1)
    assert first.leases == 1
    assert choose(strategy, endpoints, query(affinity_key="session"), 1) is first


def test_queue_depth_smooths_and_never_forgets_our_own() -> None:
    endpoints = fleet(3)
    scraped(endpoints[0], waiting=8.0)
    scraped(endpoints[1], waiting=1.0)
    for _ in range(4):
        endpoints[2].backlog.add(100, 0.0, 8000.0)
    assert order(made("queue-depth"), endpoints) == "bca"


def test_latency_prefers_the_short_window_and_tries_the_unknown() -> None:
    endpoints = fleet(3)
    endpoints[0].stats.record(0.1, 1.0, 10, Outcome.SUCCESS, 0.0)
    endpoints[0].stats.record(2.0, 3.0, 10, Outcome.SUCCESS, 200.0)
    endpoints[1].stats.record(0.5, 1.0, 10, Outcome.SUCCESS, 10.0)
    endpoints[2].leases = 1
    assert order(made("latency"), endpoints, now=201.0) == "bca"


def test_throughput_prefers_the_faster() -> None:
    endpoints = fleet(2)
    endpoints[0].stats.record(None, 1.0, 100, Outcome.SUCCESS, 0.0)
    endpoints[1].stats.record(None, 1.0, 500, Outcome.SUCCESS, 0.0)
    assert order(made("throughput"), endpoints, now=1.0) == "ba"


def test_locality_stays_near_until_it_costs_too_much() -> None:
    endpoints = [endpoint(0, locality="zone-1"), endpoint(1, locality="zone-2")]
    strategy = made("locality", spill=4)
    asked = query(locality="zone-2")
    assert order(strategy, endpoints, asked) == "ba"
    endpoints[1].leases = 5
    assert order(strategy, endpoints, asked) == "ab"


def test_adaptive_turns_away_from_failures_and_slowness() -> None:
    endpoints = fleet(3)
    for _ in range(20):
        endpoints[0].stats.record(None, 1.0, 1, Outcome.SUCCESS, 0.0)
        endpoints[1].stats.record(None, 1.0, 1, Outcome.SUCCESS, 0.0)
        endpoints[1].stats.record(None, 1.0, 1, Outcome.FAILURE, 0.0)
        endpoints[2].stats.record(None, 20.0, 1, Outcome.SUCCESS, 0.0)
    assert order(made("adaptive"), endpoints, now=1.0) == "abc"


def test_weighted_score_defaults_to_cache_03_and_load_07() -> None:
    strategy = made("weighted-score")
    assert strategy.terms == ("cache", "load")
    endpoints = [endpoint(0, leases=1), endpoint(1, leases=0)]
    assert order(strategy, endpoints, matched={0: 1000}) == "ba"
    assert (
        order(made("weighted-score", weights={"cache": 0.7, "load": 0.3}), endpoints, matched={0: 1000})
        == "ab"
    )


def test_weighted_score_takes_an_unknown_for_the_mean() -> None:
    endpoints = fleet(3)
    scraped(endpoints[0], kv_usage=0.9)
    scraped(endpoints[1], kv_usage=0.1)
    assert order(made("weighted-score", weights={"kv": 1}), endpoints) == "bca"
