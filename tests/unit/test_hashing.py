"""Block hashes: equal heads give equal hashes, and everything that changes what an engine caches changes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.api.request import Prompt
from extproc.kvcache.hashing import BLOCK_BYTES, MAX_BLOCKS, hash_blocks


def text(*pieces: bytes) -> Prompt:
    return Prompt(pieces=pieces, size=sum(map(len, pieces)))


def hashes(prompt: Prompt, **changes: object) -> list[int]:
    settings = {"seed": 1, "model": "llama", "adapter": "", "cache_salt": ""} | changes
    return hash_blocks(prompt, **settings)  # type: ignore[arg-type]


def test_only_full_blocks_have_a_hash() -> None:
    assert hashes(text(b"x" * (BLOCK_BYTES - 1))) == []
    assert len(hashes(text(b"x" * BLOCK_BYTES))) == 1
    assert len(hashes(text(b"x" * (3 * BLOCK_BYTES + 5)))) == 3


def test_a_longer_prompt_continues_the_hashes_of_its_head() -> None:
    head = b"system prompt " * 100
    assert hashes(text(head, b"more" * 500))[:4] == hashes(text(head))[:4]


def test_equal_blocks_at_different_depths_differ() -> None:
    first, second = hashes(text(b"x" * (2 * BLOCK_BYTES)))
    assert first != second


def test_where_pieces_are_cut_does_not_matter() -> None:
    whole = bytes(range(256)) * 4
    assert hashes(text(whole)) == hashes(text(whole[:100], whole[100:700], whole[700:]))


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"model": "qwen"}, {"adapter": "sql"}, {"cache_salt": "tenant-a"}]
)
def test_the_chain_starts_from_seed_model_adapter_and_salt(change: dict[str, object]) -> None:
    prompt = text(b"x" * 600)
    assert not set(hashes(prompt)) & set(hashes(prompt, **change))


def test_model_and_adapter_cannot_be_confused() -> None:
    prompt = text(b"x" * 600)
    assert hashes(prompt, model="a", adapter="b") != hashes(prompt, model="ab", adapter="")
    assert hashes(prompt, model="a\0b", adapter="") != hashes(prompt, model="a", adapter="b\0")


def test_token_ids_are_cut_at_64_a_block_and_never_equal_text() -> None:
    ids = Prompt(token_ids=tuple(range(130)), size=520)
    found = hashes(ids)
    assert len(found) == 2
    assert found[:1] == hashes(Prompt(token_ids=tuple(range(64)), size=256))
    same_bytes = b"".join(number.to_bytes(4, "little") for number in range(130))
    assert found[0] != hashes(text(same_bytes))[0]


def test_absurd_token_ids_are_hashed_all_the_same() -> None:
    assert len(hashes(Prompt(token_ids=(-1, 2**40) * 32, size=256))) == 1


def test_very_long_prompts_are_cut() -> None:
    assert len(hashes(text(b"x" * (BLOCK_BYTES * (MAX_BLOCKS + 10))))) == MAX_BLOCKS


@given(head=st.binary(max_size=1500), a=st.binary(max_size=1500), b=st.binary(max_size=1500))
def test_common_hashes_are_the_common_full_blocks(head: bytes, a: bytes, b: bytes) -> None:
    left, right = head + a, head + b
    common = 0
    while (common + 1) * BLOCK_BYTES <= min(len(left), len(right)) and left[
        : (common + 1) * BLOCK_BYTES
    ] == right[: (common + 1) * BLOCK_BYTES]:
        common += 1
    both = list(zip(hashes(text(left)), hashes(text(right)), strict=False))
    assert [x == y for x, y in both] == [at < common for at in range(len(both))]
    assert all(0 <= value < 2**64 for pair in both for value in pair)
