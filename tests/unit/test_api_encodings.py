"""Compressed bodies: every coding clients use, whole or refused, never more than the limit."""

from __future__ import annotations

import contextlib
import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from extproc.api.encodings import DecodeError, decode

MIB = 1 << 20


def raw_deflate(data: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-15)
    return coder.compress(data) + coder.flush()


CODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": lambda data: bytes(brotli.compress(data, quality=1)),
    "zstd": zstandard.compress,
}
CODINGS = pytest.mark.parametrize("coding", CODERS)
TEXT = b'{"model":"m","prompt":"' + bytes(random.Random(1).choices(range(97, 123), k=30_000)) + b'"}'


def reason(body: bytes, coding: str, limit: int = MIB) -> str:
    with pytest.raises(DecodeError) as caught:
        decode(body, coding, limit)
    return caught.value.reason


@CODINGS
def test_what_was_packed_comes_out(coding: str) -> None:
    assert decode(CODERS[coding](TEXT), coding, MIB) == TEXT


def test_a_header_may_be_written_in_many_ways() -> None:
    assert decode(gzip.compress(TEXT), " X-GZIP ", MIB) == TEXT
    assert decode(gzip.compress(TEXT), "identity, gzip", MIB) == TEXT
    assert decode(TEXT, "identity", MIB) == TEXT
    assert decode(TEXT, "", MIB) == TEXT


def test_deflate_without_its_zlib_wrapper() -> None:
    assert decode(raw_deflate(TEXT), "deflate", MIB) == TEXT


def test_a_list_was_applied_in_order() -> None:
    assert decode(zstandard.compress(brotli.compress(gzip.compress(TEXT))), "gzip, br, zstd", MIB) == TEXT


def test_several_members_or_frames_are_one_body() -> None:
    assert decode(gzip.compress(b"a") + gzip.compress(b"b") + b"\0\0", "gzip", 10) == b"ab"
    assert decode(zstandard.compress(b"a") + zstandard.compress(b"b"), "zstd", 10) == b"ab"


@CODINGS
def test_the_limit_is_exact(coding: str) -> None:
    packed = CODERS[coding](b"x" * 1000)
    assert decode(packed, coding, 1000) == b"x" * 1000
    assert reason(packed, coding, 999) == "too_large"


def test_the_limit_holds_over_members() -> None:
    assert reason(gzip.compress(b"x" * 600) * 2, "gzip", 1000) == "too_large"
    assert reason(zstandard.compress(b"x" * 600) * 2, "zstd", 1000) == "too_large"


@CODINGS
def test_a_bomb_costs_no_more_than_the_limit(coding: str) -> None:
    bomb = CODERS[coding](bytes(64 * MIB))
    tracemalloc.start()
    try:
        assert reason(bomb, coding) == "too_large"
        assert tracemalloc.get_traced_memory()[1] < 24 * MIB
    finally:
        tracemalloc.stop()


def test_a_bomb_inside_a_list_is_stopped_at_its_layer() -> None:
    assert reason(gzip.compress(gzip.compress(bytes(8 * MIB))), "gzip, gzip") == "too_large"


def test_plain_bodies_have_the_limit_too() -> None:
    assert reason(b"xx", "identity", 1) == "too_large"


@CODINGS
def test_a_cut_body_is_said_to_be_cut(coding: str) -> None:
    packed = CODERS[coding](TEXT)
    assert reason(packed[: len(packed) // 2], coding) == "truncated"
    assert reason(packed[:-1], coding) == "truncated"


@CODINGS
def test_rubbish_is_corrupt(coding: str) -> None:
    assert reason(b"this is no packed body at all", coding) in ("corrupt", "truncated")


def test_rubbish_after_the_end_is_corrupt() -> None:
    for coding, coder in CODERS.items():
        if coding != "br":
            assert reason(coder(TEXT) + b"rubbish!", coding) in ("corrupt", "truncated")


@pytest.mark.parametrize("coding", ["lzma", "gzip, compress", "gzip;q=1", ",".join(["gzip"] * 5)])
def test_other_codings_are_unknown(coding: str) -> None:
    assert reason(b"x", coding) == "unknown_encoding"


def test_a_zstd_window_above_the_webs_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    coder = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    assert reason(coder.compress(TEXT) + coder.flush(), "zstd") == "corrupt"


def test_nothing_stays_nothing() -> None:
    assert decode(b"", "gzip, br", 10) == b""


@given(st.binary(max_size=200), st.sampled_from([*CODERS, "x-gzip", "gzip, br"]))
def test_no_bytes_raise_anything_else(body: bytes, coding: str) -> None:
    with contextlib.suppress(DecodeError):
        assert len(decode(body, coding, 1000)) <= 1000


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_a_body_of_countless_empty_frames_is_given_up(coding: str) -> None:
    frame = CODERS[coding](b"")
    assert decode(frame * 4096, coding, MIB) == b""
    assert reason(frame * 400_000, coding) == "too_many_frames"


def test_members_longer_than_a_step_are_read_whole() -> None:
    noise = random.Random(2).randbytes(300_000)
    assert decode(gzip.compress(noise) + b"\0" * 70_000 + gzip.compress(noise), "gzip", MIB) == noise * 2
