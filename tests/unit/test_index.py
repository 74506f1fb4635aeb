"""The approximate index: what it claims an endpoint holds, how it forgets, and that it stays bounded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extproc.api.request import Prompt
from extproc.engines.state import EngineState
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.fleet.model_stats import ModelStats
from extproc.kvcache.approximate import ApproximateIndex, Claim
from extproc.kvcache.view import CacheView


def test_a_prompt_is_held_from_its_claim_on() -> None:
    index = ApproximateIndex()
    index.insert(3, [1, 2, 3])
    assert index.match([1, 2, 3, 4]) == {3: 3}
    assert index.match([9, 1, 2]) == {}


def test_one_walk_answers_for_every_holder() -> None:
    index = ApproximateIndex()
    index.insert(0, [1, 2, 3, 4])
    index.insert(1, [1, 2])
    index.insert(2, [1, 2, 30])
    assert index.match([1, 2, 3, 4]) == {0: 4, 1: 2, 2: 2}


def test_undo_takes_back_what_the_prompt_brought_and_nothing_else() -> None:
    index = ApproximateIndex()
    index.insert(0, [1, 2]).keep()
    index.insert(0, [1, 2, 3, 4]).undo()
    assert index.match([1, 2, 3, 4]) == {0: 2}


def test_a_block_that_two_claims_stand_for_outlives_the_undo_of_one() -> None:
    index = ApproximateIndex()
    first = index.insert(0, [1, 2, 3])
    second = index.insert(0, [1, 2, 3, 4])
    first.undo()
    assert index.match([1, 2, 3, 4]) == {0: 4}
    second.undo()
    assert index.match([1, 2, 3, 4]) == {}
    assert index.entries == 0


def test_a_kept_claim_cannot_be_undone_and_a_claim_ends_once() -> None:
    index = ApproximateIndex()
    claim = index.insert(0, [1, 2])
    claim.keep()
    claim.undo()
    assert index.match([1, 2]) == {0: 2}


def test_tails_go_before_heads() -> None:
    index = ApproximateIndex(default_blocks=4)
    index.insert(0, [1, 2, 3, 4]).keep()
    index.insert(0, [10, 11]).keep()
    assert index.match([1, 2, 3, 4]) == {0: 2}
    assert index.match([10, 11]) == {0: 2}


def test_a_prompt_larger_than_the_room_keeps_its_head() -> None:
    index = ApproximateIndex(default_blocks=3)
    index.insert(0, list(range(1, 10))).keep()
    assert index.match(list(range(1, 10))) == {0: 3}
    assert index.entries == 3


def test_use_keeps_a_prefix_alive() -> None:
    index = ApproximateIndex(default_blocks=4)
    index.insert(0, [1, 2]).keep()
    index.insert(0, [10, 11]).keep()
    index.insert(0, [1, 2]).keep()
    index.insert(0, [20, 21]).keep()
    assert index.match([1, 2]) == {0: 2}
    assert index.match([10, 11]) == {}


def test_generated_text_takes_room() -> None:
    index = ApproximateIndex(default_blocks=6)
    index.insert(0, [1, 2, 3]).keep()
    index.insert(0, [4]).keep()
    index.occupy(0, 4)
    assert index.entries <= 6
    assert index.match([1, 2, 3]) == {0: 1}


def test_the_next_turn_is_expected_to_find_the_answer_too() -> None:
    index = ApproximateIndex()
    index.insert(0, [1, 2]).keep()
    index.occupy(0, 3, after=2)
    follow_up = [1, 2, 20, 21, 22, 23]
    assert index.match(follow_up) == {0: 2}
    assert index.expect(follow_up) == {0: 5}
    assert index.expect_of(0, follow_up) == 5


def test_a_prompt_too_short_to_repeat_the_answer_is_not_credited() -> None:
    index = ApproximateIndex()
    index.insert(0, [1, 2]).keep()
    index.occupy(0, 3, after=2)
    assert index.expect([1, 2, 20]) == {0: 2}


def test_an_answer_is_credited_until_a_prompt_goes_on_from_it() -> None:
    index = ApproximateIndex()
    index.insert(0, [1, 2]).keep()
    index.occupy(0, 3, after=2)
    index.insert(0, [1, 2, 20, 21, 22, 23]).keep()
    assert index.blocks_of(0) == 6
    assert index.expect([1, 2, 30, 31, 32, 33]) == {0: 2}


def test_purge_forgets_one_endpoint_and_ends_its_claims() -> None:
    index = ApproximateIndex()
    claim = index.insert(0, [1, 2])
    index.insert(1, [1, 2]).keep()
    index.purge(0)
    index.insert(0, [1]).keep()
    claim.undo()
    assert index.match([1, 2]) == {0: 1, 1: 2}


def test_purging_a_large_endpoint_is_spread_over_later_calls() -> None:
    index = ApproximateIndex(default_blocks=100_000)
    for start in range(0, 50_000, 1000):
        index.insert(0, list(range(start, start + 1000))).keep()
    index.purge(0)
    assert index.match([0, 1, 2]) == {}
    assert index.entries > 40_000
    while index.drain():
        pass
    assert (index.entries, index.distinct) == (0, 0)


def test_shrinking_is_spread_over_later_calls() -> None:
    index = ApproximateIndex(default_blocks=10_000)
    index.insert(0, list(range(10_000))).keep()
    index.resize(0, 100)
    while index.drain(500):
        pass
    assert index.match(list(range(10_000))) == {0: 100}


def test_the_bound_over_all_endpoints_is_shared_by_wish() -> None:
    index = ApproximateIndex(max_blocks=300, default_blocks=100)
    for slot in range(6):
        index.insert(slot, list(range(slot * 1000, slot * 1000 + 100))).keep()
    while index.drain():
        pass
    assert index.entries <= 300
    assert [index.room_of(slot) for slot in range(6)] == [50] * 6


def test_a_million_unique_prompts_stay_within_the_bound() -> None:
    index = ApproximateIndex(max_blocks=2_000, default_blocks=1_000)
    for number in range(20_000):
        index.insert(number % 4, range(number * 50, number * 50 + 50)).keep()
    assert index.entries <= 2_000
    assert index.distinct <= 2_000


class AgainstNaiveModel(RuleBasedStateMachine):
    """The index never claims a block that a plain record of what was sent does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ApproximateIndex(max_blocks=40, default_blocks=12)
        self.sent: dict[int, set[int]] = {slot: set() for slot in range(4)}
        self.claims: list[tuple[int, list[int], Claim]] = []

    @rule(slot=st.integers(0, 3), family=st.integers(0, 3), depth=st.integers(1, 14))
    def insert(self, slot: int, family: int, depth: int) -> None:
        hashes = [family * 100 + at // (2 if at > 5 else 1) * 7 + at for at in range(depth)]
        claim = self.index.insert(slot, hashes)
        self.sent[slot].update(hashes)
        self.claims.append((slot, hashes, claim))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.claims:
            at = data.draw(st.integers(0, len(self.claims) - 1))
            claim = self.claims.pop(at)[2]
            claim.keep() if data.draw(st.booleans()) else claim.undo()

    @rule(slot=st.integers(0, 3), blocks=st.integers(0, 15), after=st.integers(0, 20))
    def answer(self, slot: int, blocks: int, after: int) -> None:
        self.index.occupy(slot, blocks, after)

    @rule(slot=st.integers(0, 3))
    def purge(self, slot: int) -> None:
        self.index.purge(slot)
        self.sent[slot].clear()

    @rule(slot=st.integers(0, 3), blocks=st.integers(1, 20))
    def resize(self, slot: int, blocks: int) -> None:
        self.index.resize(slot, blocks)

    @rule()
    def drain(self) -> None:
        while self.index.drain():
            pass
        assert self.index.entries <= self.index.cap
        assert all(self.index.blocks_of(slot) <= self.index.room_of(slot) for slot in range(4))

    @invariant()
    def never_claims_what_was_not_sent(self) -> None:
        for family in range(4):
            hashes = [family * 100 + at // (2 if at > 5 else 1) * 7 + at for at in range(14)]
            for slot, depth in self.index.match(hashes).items():
                assert set(hashes[:depth]) <= self.sent[slot]
                assert depth <= self.index.blocks_of(slot)

    @invariant()
    def counts_add_up(self) -> None:
        assert self.index.entries >= sum(self.index.blocks_of(slot) for slot in range(4)) >= 0
        assert self.index.distinct <= self.index.entries


AgainstNaiveModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstNaiveModel = AgainstNaiveModel.TestCase


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30), room=st.integers(1, 50))
def test_everything_undone_leaves_nothing(lengths: list[int], room: int) -> None:
    index = ApproximateIndex(default_blocks=room)
    claims = [
        index.insert(0, [number % 3 * 1000 + at for at in range(n)]) for number, n in enumerate(lengths)
    ]
    for claim in claims:
        claim.undo()
    assert (index.entries, index.distinct) == (0, 0)


def endpoint(slot: int = 0) -> Endpoint:
    return Endpoint(EndpointSpec("replica", "10.0.0.1:8000", "pool"), slot)


def test_the_view_counts_in_tokens_and_always_leaves_one_to_compute() -> None:
    view = CacheView(ApproximateIndex(), ModelStats(), seed=5)
    look = view.look(Prompt((b"x" * 1024,), size=1024), "llama")
    view.claim(endpoint(), look)
    assert look.prompt_tokens == 256
    assert view.match(look) == {0: 255}
    assert view.held(endpoint(1), look) == 0


def test_the_views_tokens_follow_the_models_learned_density() -> None:
    models = ModelStats()
    for _ in range(200):
        models.observe("zh", prompt_bytes=2000, prompt_tokens=1000)
    view = CacheView(ApproximateIndex(), models)
    look = view.look(Prompt((b"x" * 2048,), size=2048), "zh")
    view.claim(endpoint(), look)
    longer = view.look(Prompt((b"x" * 2048, b"y" * 2048), size=4096), "zh")
    assert abs(view.match(longer)[0] - 1024) < 60


def test_the_room_follows_the_engines_kv_capacity() -> None:
    view = CacheView(ApproximateIndex(), ModelStats())
    replica = endpoint()
    view.fit(replica, "llama")
    assert view.index.room_of(0) == view.index.default_blocks
    replica.observe(EngineState(at=1.0, kv_blocks=40_000, block_size=16), None, 1.0)
    view.fit(replica, "llama")
    assert view.index.room_of(0) == 40_000 * 16 * 4 // 256


def test_regenerating_a_prompt_does_not_credit_its_first_answer() -> None:
    view = CacheView(ApproximateIndex(), ModelStats())
    prompt = Prompt((b"x" * 1024,), size=1024)
    for _ in range(2):
        look = view.look(prompt, "llama")
        view.claim(endpoint(), look).keep()
    view.answered(endpoint(), look, 640)
    longer = view.look(Prompt((b"x" * 1024, b"y" * 9000), size=10_024), "llama")
    assert view.match(longer) == {0: 256}
