"""The index over events: parents, copies, media, groups, salts, bounds; and that it equals a naive model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.kvcache.events import Odd, decode
from extproc.kvcache.precise import PreciseIndex, Shelf
from tests.unit.kv_engine import BLOCK, batch, chain, removed, stored

TOKENS = list(range(16))
NAMES = [101, 102, 103, 104]


def apply(index: PreciseIndex, shelf: Shelf, *events: Any) -> None:
    for event in decode(batch(*events)):
        assert not isinstance(event, Odd)
        for _ in index.apply(shelf, event):
            pass


def held(index: PreciseIndex, tokens: list[int] = TOKENS, slot: int = 0, **more: Any) -> float:
    return index.match(chain(tokens, **more)).get(slot, 0)


@pytest.fixture
def index() -> PreciseIndex:
    return PreciseIndex(worth={"GPU": 1.0, "CPU": 0.5})


@pytest.fixture
def shelf(index: PreciseIndex) -> Shelf:
    return index.shelf(0)


def test_a_prompt_may_come_in_parts_behind_their_parents(index: PreciseIndex, shelf: Shelf) -> None:
    apply(index, shelf, stored(NAMES[:1], TOKENS[:4]))
    apply(index, shelf, stored(NAMES[1:], TOKENS[4:], NAMES[0]))
    assert held(index) == 4
    assert held(index, [*TOKENS[:8], 99, 99, 99, 99]) == 2


def test_an_orphan_is_never_chained(index: PreciseIndex, shelf: Shelf) -> None:
    apply(index, shelf, stored(NAMES[1:], TOKENS[4:], NAMES[0]))
    assert index.counts.orphans == 3
    assert index.entries == 0
    apply(index, shelf, stored(NAMES[:1], TOKENS[:4]))
    assert held(index) == 1


def test_a_block_held_twice_is_held_until_both_copies_are_gone(index: PreciseIndex, shelf: Shelf) -> None:
    apply(index, shelf, stored(NAMES, TOKENS), stored(NAMES[:2], TOKENS[:8]))
    apply(index, shelf, removed(NAMES[1:2]))
    assert held(index) == 4
    apply(index, shelf, removed(NAMES[1:2]))
    assert held(index) == 1


def test_a_block_on_the_cpu_is_worth_less_and_counts_for_those_behind_it(
    index: PreciseIndex, shelf: Shelf
) -> None:
    apply(index, shelf, stored(NAMES, TOKENS))
    apply(index, shelf, stored(NAMES[1:2], [], size=0, medium="CPU"))
    assert held(index) == 4
    apply(index, shelf, removed(NAMES[1:2]))
    assert held(index) == pytest.approx(3.5)
    apply(index, shelf, stored(NAMES[1:2], TOKENS[4:8], NAMES[0]))
    assert held(index) == 4
    apply(index, shelf, removed(NAMES[1:2], medium="CPU"), removed(NAMES[1:2]))
    assert held(index) == 1


def test_media_worth_nothing_are_left_out(index: PreciseIndex, shelf: Shelf) -> None:
    apply(index, shelf, stored(NAMES, TOKENS, medium="TAPE"))
    assert (held(index), index.counts.skipped) == (0, 4)


def test_a_removal_from_another_medium_removes_nothing(index: PreciseIndex, shelf: Shelf) -> None:
    apply(index, shelf, stored(NAMES, TOKENS), removed(NAMES, medium="CPU"))
    assert held(index) == 4


def test_only_full_attention_is_followed(index: PreciseIndex, shelf: Shelf) -> None:
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    apply(index, shelf, stored(NAMES, TOKENS, **window), stored(NAMES, TOKENS, **full))
    apply(index, shelf, removed(NAMES, group_idx=0))
    assert held(index) == 4
    apply(index, shelf, removed(NAMES[2:], group_idx=1))
    assert held(index) == 2


def test_a_further_group_of_an_engine_that_tells_no_kinds_is_left_out(
    index: PreciseIndex, shelf: Shelf
) -> None:
    apply(index, shelf, stored(NAMES, TOKENS, group_idx=2))
    assert held(index) == 0


def test_blocks_of_another_size_are_left_out(index: PreciseIndex, shelf: Shelf) -> None:
    apply(index, shelf, stored(NAMES, TOKENS), stored([7], [1, 2], size=2))
    assert (shelf.block_size, index.entries, index.counts.skipped) == (BLOCK, 4, 1)


def test_adapters_and_salts_make_blocks_of_their_own(index: PreciseIndex, shelf: Shelf) -> None:
    salted = {"lora_name": "sql", "extra_keys": [["sql", "tenant"], ["sql"], ["sql"], ["sql"]]}
    apply(index, shelf, stored(NAMES, TOKENS, **salted))
    assert held(index) == held(index, adapter="sql") == held(index, salt="tenant") == 0
    assert held(index, adapter="sql", salt="tenant") == 4


def test_an_image_ends_the_match_of_prompts_without_it(index: PreciseIndex, shelf: Shelf) -> None:
    image = {"extra_keys": [None, [["image digest", 0]], None, None]}
    apply(index, shelf, stored(NAMES, TOKENS, **image))
    assert held(index) == 1


def test_two_engine_names_for_the_same_tokens_are_one_block_until_both_are_gone(
    index: PreciseIndex, shelf: Shelf
) -> None:
    apply(index, shelf, stored([1], TOKENS[:4]), stored([2], TOKENS[:4]), removed([1]))
    assert held(index) == 1
    apply(index, shelf, removed([2]))
    assert (held(index), index.entries) == (0, 0)


def test_a_token_that_is_no_token_is_counted(index: PreciseIndex, shelf: Shelf) -> None:
    apply(index, shelf, stored([1], [-1, 2, 3, 4]))
    assert index.counts.undecodable == 1


def test_memory_is_bounded_and_the_shelf_says_that_it_is_incomplete() -> None:
    index = PreciseIndex(max_blocks=3)
    shelf = index.shelf(0)
    apply(index, shelf, stored(NAMES, TOKENS))
    assert (index.entries, index.counts.left_out, shelf.incomplete) == (3, 1, True)
    assert held(index) == 3
    apply(index, shelf, removed(NAMES[2:3]), stored([9], [9, 9, 9, 9]))
    assert index.entries == 3


def test_a_discarded_shelf_is_not_asked_and_drained_bit_by_bit(index: PreciseIndex) -> None:
    shelf = index.shelf(0)
    tokens = list(range(4000))
    apply(index, shelf, stored(range(1000), tokens))
    index.discard(shelf)
    assert held(index, tokens) == 0
    assert index.entries > 0
    other = index.shelf(0)
    apply(index, other, stored(NAMES, tokens[:16]))
    assert held(index, tokens) == 4
    while index.drain(100):
        pass
    assert (index.entries, held(index, tokens)) == (4, 4)


_LONG = [[1] * 8, [1] * 8 + [2] * 8, [3] * 12, [1] * 4 + [3] * 8]
_step = st.one_of(
    st.tuples(
        st.just("store"),
        st.integers(0, 3),
        st.sampled_from(range(len(_LONG))),
        st.sampled_from(("GPU", "CPU")),
    ),
    st.tuples(st.just("remove"), st.integers(0, 3), st.integers(0, 30), st.sampled_from(("GPU", "CPU"))),
    st.tuples(st.just("purge"), st.integers(0, 3), st.just(0), st.just("")),
    st.tuples(st.just("drain"), st.just(0), st.integers(1, 8), st.just("")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_step, max_size=50))
def test_the_index_equals_a_naive_model(steps: list[tuple[str, int, int, str]]) -> None:
    index = PreciseIndex(worth={"GPU": 1.0, "CPU": 0.5})
    # Shelves 0 and 1 are ranks of slot 0; each names blocks in its own way.
    slots = [0, 0, 1, 2]
    shelves = [index.shelf(slot) for slot in slots]
    model: list[dict[tuple[int, ...], dict[str, int]]] = [{} for _ in slots]

    def name(which: int, prefix: tuple[int, ...]) -> int:
        return hash((which, prefix)) & (2**64 - 1)

    for what, which, number, medium in steps:
        if what == "store":
            tokens = _LONG[number]
            prefixes = [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
            apply(
                index,
                shelves[which],
                stored([name(which, one) for one in prefixes], tokens, medium=medium),
            )
            for prefix in prefixes:
                copies = model[which].setdefault(prefix, {})
                copies[medium] = copies.get(medium, 0) + 1
        elif what == "remove" and model[which]:
            prefix = sorted(model[which])[number % len(model[which])]
            apply(index, shelves[which], removed([name(which, prefix)], medium=medium))
            copies = model[which][prefix]
            if copies.get(medium):
                copies[medium] -= 1
                if not copies[medium]:
                    del copies[medium]
                if not copies:
                    del model[which][prefix]
        elif what == "purge":
            index.discard(shelves[which])
            shelves[which] = index.shelf(slots[which])
            model[which] = {}
        elif what == "drain":
            index.drain(number)
    for tokens in _LONG:
        wanted: dict[int, float] = {}
        for which, slot in enumerate(slots):
            worth = 0.0
            for end in range(BLOCK, len(tokens) + 1, BLOCK):
                copies = model[which].get(tuple(tokens[:end]))
                if not copies:
                    break
                worth += 1.0 if "GPU" in copies else 0.5
            if worth:
                wanted[slot] = wanted.get(slot, 0.0) + worth / slots.count(slot)
        assert index.match(chain(tokens)) == pytest.approx(wanted)
    while index.drain():
        pass
    assert index.entries == sum(map(len, model))
