"""The load client's parser: one response, cut anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.http_parse import ProtocolError, ResponseParser

SSE = b'data: {"a":1}\n\n'
END = b"data: [DONE]\n\n"


def chunked(*pieces: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def fed(data: bytes, cuts: list[int] | None = None) -> ResponseParser:
    parser = ResponseParser()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts or [])})
    for start, end in itertools.pairwise(places):
        parser.feed(data[start:end])
    return parser


def test_a_body_with_a_length_ends_at_its_length() -> None:
    parser = fed(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
    assert (parser.done, parser.status, parser.body_bytes, parser.reusable) == (True, 200, 5, True)


def test_an_unfinished_body_is_not_done() -> None:
    assert not fed(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhello").done


def test_a_response_without_a_body_is_done_after_its_head() -> None:
    assert fed(b"HTTP/1.1 204 No Content\r\n\r\n").done


def test_an_interim_answer_is_passed_over() -> None:
    parser = fed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 Too Many\r\ncontent-length: 2\r\n\r\n{}")
    assert (parser.done, parser.status) == (True, 429)


def test_a_body_without_an_end_lasts_until_the_peer_closes() -> None:
    parser = fed(b"HTTP/1.1 200 OK\r\n\r\nhello")
    assert not parser.done
    assert parser.eof()
    assert not parser.reusable


def test_a_cut_chunked_body_is_not_complete_at_the_end_of_the_connection() -> None:
    assert not fed(chunked(SSE, END)[:-5]).eof()


def test_connection_close_forbids_another_request() -> None:
    assert not fed(b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 0\r\n\r\n").reusable


def test_trailers_and_chunk_extensions_are_understood() -> None:
    data = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nx-trailer: 1\r\n\r\n"
    parser = fed(data)
    assert (parser.done, parser.body_bytes) == (True, 3)


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"x" * 70_000])
def test_what_is_no_http_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        fed(data)


def test_what_is_no_chunk_size_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        fed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnope\r\n")


@given(
    events=st.integers(0, 8),
    piece=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
)
def test_the_same_events_are_counted_however_the_bytes_arrive(
    events: int, piece: int, cuts: list[int]
) -> None:
    body = SSE * events + END
    parser = fed(chunked(*(body[at : at + piece] for at in range(0, len(body), piece))), cuts)
    assert parser.done
    assert parser.body_bytes == len(body)
    assert parser.events == events + 1
    assert parser.tail.endswith(END)
