"""One question to both indexes: exact where events are whole, the larger where they are not, approximate elsewhere."""

from __future__ import annotations

from extproc.api.request import Prompt
from extproc.fleet.endpoint import Endpoint
from extproc.fleet.model_stats import ModelStats
from extproc.kvcache import token_chain
from extproc.kvcache.approximate import ApproximateIndex
from extproc.kvcache.rank import Rank, State
from extproc.kvcache.view import CacheView
from tests.unit.core_parts import spec
from tests.unit.kv_engine import BLOCK, KvEngine

TOKENS = list(range(40))
TEXT = b"x" * 1600


def view() -> CacheView:
    return CacheView(ApproximateIndex(), ModelStats(), seed=7, block_bytes=256)


def prompt(tokens: list[int] | None = TOKENS) -> Prompt:
    packed = None if tokens is None else token_chain.packed(tokens)
    return Prompt((TEXT,), size=len(TEXT), tokens=packed)


def endpoint(slot: int) -> Endpoint:
    return Endpoint(spec(f"e{slot}"), slot)


def live(of: CacheView, slot: int, engine: KvEngine) -> Rank:
    rank = of.ranks.add(slot, 0, can_replay=False)
    rank.begin()
    pump(rank, engine)
    return rank


def pump(rank: Rank, engine: KvEngine) -> None:
    for message in engine.sent:
        rank.message(*message)
    engine.sent = []
    while rank.step():
        pass


def test_an_exact_endpoint_answers_in_whole_blocks_before_the_last_token() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt(TOKENS)
    live(caches, 0, engine)
    assert caches.match(caches.look(prompt(), "m")) == {0: 36}
    assert caches.match(caches.look(prompt([*TOKENS, 1]), "m")) == {0: 40}


def test_what_an_exact_endpoint_evicted_is_not_held_whatever_we_sent_it() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt(TOKENS)
    rank = live(caches, 0, engine)
    look = caches.look(prompt(), "m")
    caches.claim(endpoint(0), look).keep()
    for _ in range(10):
        engine.evict(0)
    engine.prompt([99] * BLOCK)
    pump(rank, engine)
    assert caches.match(look) == {}
    assert caches.held(endpoint(0), look) == 0


def test_a_prompt_on_its_way_counts_from_the_decision_until_its_end() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt([99] * BLOCK)
    live(caches, 0, engine)
    look = caches.look(prompt(), "m")
    claim = caches.claim(endpoint(0), look)
    assert caches.match(look) == {0: 36}
    claim.undo()
    assert caches.match(look) == {}


def test_a_prompt_stays_held_until_its_engine_has_told_of_it_after_its_end() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt([99] * BLOCK)
    rank = live(caches, 0, engine)
    look = caches.look(prompt(), "m")
    caches.claim(endpoint(0), look).keep()
    engine.prompt([98] * BLOCK)
    pump(rank, engine)
    assert caches.match(look) == {0: 36}
    engine.prompt(TOKENS)
    pump(rank, engine)
    assert caches.match(look) == {0: 36}
    assert len(caches.in_flight) == 0


def test_a_prompt_told_and_evicted_at_once_is_held_for_a_few_messages_at_most() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt([99] * BLOCK)
    rank = live(caches, 0, engine)
    look = caches.look(prompt(), "m")
    caches.claim(endpoint(0), look).keep()
    for number in range(16):
        engine.prompt([number] * BLOCK)
    pump(rank, engine)
    assert caches.match(look) == {}


def test_an_engine_that_keeps_silent_is_believed_after_a_while() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt([99] * BLOCK)
    live(caches, 0, engine)
    look = caches.look(prompt(), "m")
    caches.claim(endpoint(0), look).keep()
    caches.drain()
    caches.drain()
    assert caches.match(look) == {}
    assert len(caches.in_flight) == 0


def test_a_follower_shares_what_it_has_in_common_with_the_prompt_on_its_way() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt([99] * BLOCK)
    live(caches, 0, engine)
    long = list(range(400))
    caches.claim(endpoint(0), caches.look(prompt(long), "m"))
    for common in (0, 3, 4, 63, 64, 68, 200, 399):
        other = long[:common] + [7_000] * 50
        held = caches.held(endpoint(0), caches.look(prompt(other), "m"))
        assert held == common // BLOCK * BLOCK


def test_a_partial_endpoint_answers_the_larger_of_both() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt(TOKENS[:8])
    rank = live(caches, 0, engine)
    rank.state = State.PARTIAL
    look = caches.look(prompt(), "m")
    assert caches.match(look) == {0: 8}
    caches.claim(endpoint(0), look).keep()
    assert caches.match(look)[0] > 30


def test_without_tokens_every_endpoint_is_approximate() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt(TOKENS)
    live(caches, 0, engine)
    assert caches.match(caches.look(prompt(None), "m")) == {}


def test_one_pool_may_have_both_kinds_and_several_block_sizes() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt(TOKENS)
    live(caches, 0, engine)
    look = caches.look(prompt(), "m")
    caches.claim(endpoint(1), look).keep()
    held = caches.match(caches.look(prompt(), "m"))
    assert held[0] == 36
    assert held[1] == 38  # six blocks of 256 bytes, at 40 tokens in 1,600 bytes


def test_a_lease_keeps_no_tokens_but_the_chain_of_its_endpoint() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt(TOKENS)
    live(caches, 0, engine)
    look = caches.look(prompt(), "m")
    caches.claim(endpoint(0), look)
    assert look.packed is None
    assert [len(chain) for chain in look.chains.values()] == [10]
    assert caches.match(look) == {0: 36}
    other = caches.look(prompt(), "m")
    caches.claim(endpoint(1), other)
    assert (other.packed, other.chains) == (None, {})


def test_adapters_and_salts_are_caches_of_their_own() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt(TOKENS)
    live(caches, 0, engine)
    assert caches.match(caches.look(prompt(), "m", adapter="tuned")) == {}
    assert caches.match(caches.look(prompt(), "m", cache_salt="tenant")) == {}


def test_token_ids_of_the_client_need_no_tokenizer() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt(TOKENS)
    live(caches, 0, engine)
    sent = Prompt(token_ids=tuple(TOKENS), size=160)
    assert caches.match(caches.look(sent, "m")) == {0: 36}


def test_a_restart_seen_by_the_metrics_forgets_both() -> None:
    caches, engine = view(), KvEngine()
    engine.prompt(TOKENS)
    live(caches, 0, engine)
    look = caches.look(prompt(), "m")
    claim = caches.claim(endpoint(0), look)
    caches.purge(endpoint(0))
    claim.keep()
    assert caches.match(look) == {}
    assert len(caches.in_flight) == 0
