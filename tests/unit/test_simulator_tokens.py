"""Tokens, block hashes and replies of the simulated engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.simulator import tokens
from extproc.simulator.presets import A10, H100, LLAMA_8B, LLAMA_70B, PRESETS, from_hardware
from extproc.simulator.reply import reply_text

texts = st.text(max_size=50)
turn = st.tuples(st.sampled_from(["user", "assistant", "system"]), texts)
conversations = st.lists(turn, min_size=1, max_size=6)


def chat(turns: list[tuple[str, str]]) -> bytes:
    return tokens.tokenise(tokens.chat_pieces([{"role": role, "content": text} for role, text in turns]))


@given(conversations, texts, st.integers(1, 60))
def test_a_reply_sent_back_has_the_tokens_it_was_generated_as(
    turns: list[tuple[str, str]], question: str, length: int
) -> None:
    prompt = chat(turns)
    reply = reply_text(prompt, length)
    following = chat([*turns, ("assistant", reply), ("user", question)])
    assert following.startswith(prompt + reply.encode())


@given(st.binary(max_size=40), st.integers(0, 300))
def test_a_reply_has_four_plain_bytes_a_token(prompt: bytes, length: int) -> None:
    text = reply_text(prompt, length)
    assert len(text) == 4 * length
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_ids_survive_the_way_to_bytes_and_back(ids: list[int]) -> None:
    assert tokens.to_ids(tokens.from_ids(ids)) == ids


def test_hashes_agree_up_to_the_first_difference() -> None:
    one = tokens.block_hashes(tokens.from_ids([1, 2, 3, 4, 5, 6, 7]), 2, None, "")
    other = tokens.block_hashes(tokens.from_ids([1, 2, 3, 9, 5, 6]), 2, None, "")
    assert len(one) == len(other) == 3
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])


def test_adapter_and_salt_change_every_hash() -> None:
    ids = tokens.from_ids(range(8))
    plain, adapter, salt = (tokens.block_hashes(ids, 4, *mix) for mix in [(None, ""), ("x", ""), (None, "x")])
    assert len({*plain, *adapter, *salt}) == 6


def test_an_image_is_a_fixed_number_of_tokens_of_its_digest() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000}}
    with_image = tokens.chat_pieces([{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}])
    without = tokens.chat_pieces([{"role": "user", "content": [{"type": "text", "text": "what?"}]}])
    assert tokens.count(tokens.tokenise(with_image)) - tokens.count(tokens.tokenise(without)) == 256


def test_a_model_of_eight_billion_on_an_h100() -> None:
    profile = from_hardware(LLAMA_8B, H100)
    # 16 GB of weights at 0.7 x 3.35 TB/s; 0.5 x 989 TFLOPS over 16 GFLOP a token.
    assert profile.decode_base_s == pytest.approx(0.00685, rel=0.01)
    assert profile.prefill_tokens_per_s == pytest.approx(30_800, rel=0.01)
    # 54 GB of cache at 128 KiB a token.
    assert profile.kv_blocks * profile.block_size == pytest.approx(411_500, rel=0.01)


def test_a_model_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        from_hardware(LLAMA_70B, A10)


def test_there_is_a_preset_for_demonstrations_and_one_without_delays() -> None:
    assert PRESETS["instant"].prefill_s(1_000_000) == 0
    assert PRESETS["demo"].prefill_s(200) == pytest.approx(0.025, rel=0.01)
