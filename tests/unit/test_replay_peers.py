"""Peers' policies, each against the numbers of its published formula."""

from __future__ import annotations

import random

import pytest

from extproc.engines.state import EngineState
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.replay.peers import PEERS
from extproc.replay.peers.aibrix_prefix import AibrixPrefix
from extproc.replay.peers.dynamo_kv import DynamoKv
from extproc.replay.peers.llmd_token_aware import LlmdTokenAware
from extproc.replay.peers.llmd_weighted import LlmdWeighted
from extproc.replay.peers.longest_match import LongestMatch
from extproc.replay.peers.production_stack_trie import ProductionStackTrie
from extproc.replay.peers.sglang_threshold import SglangThreshold
from extproc.scheduling.options import Options
from extproc.scheduling.strategy import Candidate, Query, Strategy


def endpoints(count: int = 3) -> list[Endpoint]:
    return [Endpoint(EndpointSpec(f"e{slot}", "10.0.0.1:8000", "pool"), slot) for slot in range(count)]


def candidates(targets: list[Endpoint], *matched: int) -> list[Candidate]:
    return [Candidate(target, held) for target, held in zip(targets, matched, strict=True)]


def ask(prompt: int = 1000, id: str = "r", blocks: list[int] | None = None) -> Query:
    return Query(id, prompt_tokens=prompt, output_tokens=10, stream=True, blocks=blocks or [])


def first(strategy: Strategy, query: Query, given: list[Candidate]) -> str:
    return strategy.rank(query, given, 0.0)[0].endpoint.spec.cluster


@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_peer_ranks_every_candidate_once(name: str) -> None:
    strategy = PEERS[name](Options(name, {}), random.Random(0))
    targets = endpoints(5)
    ranked = strategy.rank(ask(blocks=[1, 2]), candidates(targets, 0, 100, 0, 900, 0), 0.0)
    assert sorted(choice.endpoint.key for choice in ranked) == sorted(target.key for target in targets)
    assert all(len(choice.terms) == len(strategy.terms) for choice in ranked)


def test_longest_match_ignores_load() -> None:
    targets = endpoints()
    targets[1].leases = 500
    assert first(LongestMatch(), ask(), candidates(targets, 0, 64, 0)) == "e1"
    assert first(LongestMatch(), ask(), candidates(targets, 0, 0, 0)) != "e1"


def test_sglang_follows_a_match_above_the_threshold_only() -> None:
    targets = endpoints()
    assert first(SglangThreshold(), ask(), candidates(targets, 0, 301, 0)) == "e1"
    strategy = SglangThreshold()
    strategy.books.sent("x", targets[0], 0, 0)
    strategy.books.sent("y", targets[1], 0, 0)
    assert first(strategy, ask(), candidates(targets, 0, 300, 0)) == "e2"


def test_sglang_goes_by_load_when_the_fleet_is_out_of_balance() -> None:
    targets = endpoints()
    strategy = SglangThreshold()
    for number in range(65):
        strategy.books.sent(str(number), targets[1], 0, 0)
    assert first(strategy, ask(), candidates(targets, 0, 900, 0)) != "e1"


def test_llmd_weighted_adds_up_its_scores() -> None:
    targets = endpoints(2)
    targets[0].state = EngineState(at=0.0, waiting=0.0, kv_usage=0.5)
    targets[1].state = EngineState(at=0.0, waiting=4.0, kv_usage=0.1)
    ranked = LlmdWeighted(random.Random(0)).rank(ask(), candidates(targets, 0, 1000), 0.0)
    by_name = {choice.endpoint.spec.cluster: 7.0 - choice.cost for choice in ranked}
    assert by_name == {"e0": pytest.approx(2 + 1.0), "e1": pytest.approx(0 + 1.8 + 3.0)}


def test_llmd_token_aware_counts_tokens_until_the_first_one_comes() -> None:
    targets = endpoints(2)
    strategy = LlmdTokenAware(random.Random(0))
    assert first(strategy, ask(1000, "a"), candidates(targets, 500, 0)) == "e0"
    assert first(strategy, ask(400, "b"), candidates(targets, 0, 0)) == "e1"
    assert first(strategy, ask(10, "c"), candidates(targets, 0, 0)) == "e1"
    strategy.first_token("a")
    assert first(strategy, ask(10, "d"), candidates(targets, 0, 0)) == "e0"


def test_llmd_token_aware_sticks_to_holders_until_the_penalty() -> None:
    targets = endpoints(2)
    strategy = LlmdTokenAware(random.Random(0))
    strategy.books.sent("x", targets[0], 280_000, 0)
    assert first(strategy, ask(), candidates(targets, 800, 0)) == "e0"
    strategy.books.sent("y", targets[0], 10_000, 0)
    assert first(strategy, ask(), candidates(targets, 800, 0)) == "e1"


def test_dynamo_adds_prefill_and_decode_blocks() -> None:
    targets = endpoints(2)
    strategy = DynamoKv(random.Random(0))
    strategy.books.sent("x", targets[0], 160, 320)
    ranked = strategy.rank(ask(800), candidates(targets, 480, 0), 0.0)
    costs = {choice.endpoint.spec.cluster: choice.cost for choice in ranked}
    assert costs == {"e0": (160 + 800 - 480) / 16 + (320 + 800) / 16, "e1": 800 / 16 + 800 / 16}


def test_aibrix_takes_the_best_match_whose_load_is_within_a_deviation() -> None:
    targets = endpoints()
    strategy = AibrixPrefix(random.Random(0))
    for number in range(6):
        strategy.books.sent(str(number), targets[0], 0, 0)
    assert first(strategy, ask(), candidates(targets, 900, 100, 0)) == "e1"


def test_aibrix_goes_by_load_when_running_requests_differ_by_more_than_eight() -> None:
    targets = endpoints(2)
    strategy = AibrixPrefix(random.Random(0))
    for number in range(9):
        strategy.books.sent(str(number), targets[0], 0, 0)
    assert first(strategy, ask(), candidates(targets, 900, 0)) == "e1"


def test_production_stack_remembers_everything_it_sent() -> None:
    targets = endpoints()
    strategy = ProductionStackTrie(random.Random(3))
    home = first(strategy, ask(blocks=[1, 2, 3]), candidates(targets, 0, 0, 0))
    for _ in range(5):
        assert first(strategy, ask(blocks=[1, 2, 9]), candidates(targets, 0, 0, 0)) == home


def test_books_balance_when_requests_end_without_a_token() -> None:
    targets = endpoints(1)
    strategy = DynamoKv(random.Random(0))
    strategy.rank(ask(500, "a"), candidates(targets, 100), 0.0)
    strategy.ended("a")
    strategy.ended("a")
    books = strategy.books.of(targets[0])
    assert (books.requests, books.prefill_tokens, books.tokens) == (0, 0, 0)
