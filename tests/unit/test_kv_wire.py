"""KV events as bytes: both generations of the wire, and whatever else may come."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.kvcache.events import Cleared, Odd, Removed, Stored, WireError, decode, time_of

STORED_ARRAY = ["BlockStored", [1, 2], None, [5, 6, 7, 8], 2, None, "GPU", None]
STORED_MAP = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}
WANTED = Stored([1, 2], None, [5, 6, 7, 8], 2)


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize(
    "batch",
    [
        [1.5, [STORED_ARRAY], 0],
        [1.5, [STORED_ARRAY]],
        [1.5, [STORED_MAP], 0],
        {"ts": 1.5, "events": [STORED_MAP], "data_parallel_rank": 0},
        {"ts": 1.5, "events": [STORED_ARRAY]},
    ],
)
def test_arrays_and_maps_are_read_inside_and_out(batch: Any) -> None:
    assert list(decode(packed(batch))) == [WANTED]
    assert time_of(packed(batch)) == 1.5


def test_trailing_fields_may_be_absent() -> None:
    first_generation = ["BlockStored", [1], None, [5, 6], 2, None]
    events = list(decode(packed([0, [first_generation, ["BlockRemoved", [1]], ["AllBlocksCleared"]]])))
    assert events == [Stored([1], None, [5, 6], 2), Removed([1]), Cleared()]


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        (7, 7),
        (-1, 2**64 - 1),
        (2**64 - 1, 2**64 - 1),
        (bytes(24) + (9).to_bytes(8, "big"), 9),
        ((9).to_bytes(8, "big"), 9),
    ],
)
def test_a_block_has_one_name_however_it_is_written(sent: Any, name: int) -> None:
    event = {**STORED_MAP, "block_hashes": [sent], "parent_block_hash": sent, "token_ids": [5, 6]}
    assert list(decode(packed([0, [event]]))) == [Stored([name], name, [5, 6], 2)]
    assert list(decode(packed([0, [["BlockRemoved", [sent], "CPU"]]]))) == [Removed([name], "CPU")]


def test_all_that_a_name_depends_on_is_told() -> None:
    event = {
        **STORED_MAP,
        "medium": "cpu",
        "lora_name": "sql",
        "extra_keys": [["sql", "salt"], None],
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "session_id": "s",
        "a later field": 1,
    }
    (found,) = decode(packed([0, [event]]))
    assert found == Stored(
        [1, 2],
        None,
        [5, 6, 7, 8],
        2,
        "CPU",
        "sql",
        [["sql", "salt"], None],
        1,
        "sliding_window",
    )


def test_an_adapter_that_has_a_number_only_is_named_like_no_other() -> None:
    (found,) = decode(packed([0, [["BlockStored", [1], None, [5, 6], 2, 3]]]))
    assert isinstance(found, Stored)
    assert found.adapter == "\0003"


def test_an_offloading_tier_names_blocks_without_their_tokens() -> None:
    event = {**STORED_MAP, "token_ids": [], "block_size": 0, "medium": "CPU"}
    assert list(decode(packed([0, [event]]))) == [Stored([1, 2], None, [], 0, "CPU")]


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [5]},
        {"token_ids": "text"},
        {"block_size": 0},
        {"block_size": "2"},
        {"block_hashes": [b"short"]},
        {"block_hashes": 4},
        {"block_hashes": None},
        {"medium": 4},
        {"extra_keys": [None]},
        {"parent_block_hash": 1.5},
    ],
)
def test_an_event_that_makes_no_sense_is_counted_and_the_others_are_kept(change: dict[str, Any]) -> None:
    batch = decode(packed([0, [{**STORED_MAP, **change}, STORED_MAP]]))
    assert list(batch) == [Odd.UNDECODABLE, WANTED]


def test_a_type_we_do_not_know_is_counted_apart() -> None:
    batch = decode(packed([0, [["BlockMoved", [1]], {"type": "Other"}, STORED_MAP]]))
    assert list(batch) == [Odd.UNKNOWN, Odd.UNKNOWN, WANTED]


@pytest.mark.parametrize("value", [None, 3, "text", [], [1.0], ["ts", []], [True, []], {"ts": 1}, [1.0, {}]])
def test_what_is_no_batch_is_an_error(value: Any) -> None:
    with pytest.raises(WireError):
        decode(packed(value))


def test_a_message_nested_too_deep_is_no_batch() -> None:
    with pytest.raises(WireError):
        decode(b"\x91" * 100_000)


@given(st.binary(max_size=60))
def test_no_bytes_break_the_reader(payload: bytes) -> None:
    with contextlib.suppress(WireError):
        list(decode(payload))


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@given(_values, st.sampled_from(sorted(STORED_MAP)))
def test_no_value_breaks_the_reader(value: Any, name: str) -> None:
    list(decode(packed([0, [{**STORED_MAP, name: value}, value]])))
