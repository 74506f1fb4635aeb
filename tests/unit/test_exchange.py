"""The ext_proc stream: which messages are answered when, in every body mode."""

from __future__ import annotations

import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep

from extproc.edge.exchange import Exchange, ProtocolError, State, Verdict


def headers(
    end: bool = False, mode: int | None = None, early: bool = False, **extra: str
) -> ep.ProcessingRequest:
    message = ep.ProcessingRequest()
    pairs = {":method": "POST", ":path": "/v1/chat/completions?x=1", "x-gateway-request-id": "id-1", **extra}
    for key, value in pairs.items():
        message.request_headers.headers.headers.add(key=key.replace("_", "-"), raw_value=value.encode())
    message.request_headers.end_of_stream = end
    if mode is not None:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.send_body_without_waiting_for_header_response = early
    return message


def body(data: bytes, end: bool = True) -> ep.ProcessingRequest:
    return ep.ProcessingRequest(request_body=ep.HttpBody(body=data, end_of_stream=end))


def decide(exchange: Exchange, replaced: bytes | None = None) -> list[ep.ProcessingResponse]:
    mutation = ep.CommonResponse(clear_route_cache=True)
    metadata = ep.ProcessingResponse()
    metadata.dynamic_metadata.update({"envoy.lb": {"a": "b"}})
    return exchange.answer(Verdict(mutation, metadata), replaced)


def test_buffered_headers_go_on_and_the_body_carries_the_decision() -> None:
    exchange = Exchange()
    (first,) = exchange.receive(headers())
    assert first.WhichOneof("response") == "request_headers"
    assert not first.request_headers.response.HasField("header_mutation")
    assert exchange.receive(body(b"{}")) == []
    assert exchange.state is State.DECIDING
    assert exchange.body == b"{}"
    (answer,) = decide(exchange)
    assert answer.request_body.response.clear_route_cache
    assert answer.dynamic_metadata["envoy.lb"]["a"] == "b"
    assert exchange.state is State.DONE


def test_a_buffered_body_that_ends_with_trailers_is_whole() -> None:
    exchange = Exchange()
    exchange.receive(headers())
    exchange.receive(body(b"{}", end=False))
    assert exchange.state is State.DECIDING


def test_a_request_without_a_body_is_decided_on_its_headers() -> None:
    exchange = Exchange()
    assert exchange.receive(headers(end=True)) == []
    assert exchange.state is State.DECIDING
    assert exchange.head is not None
    assert (exchange.head.path, exchange.head.query, exchange.head.id) == (
        "/v1/chat/completions",
        "x=1",
        "id-1",
    )
    (answer,) = decide(exchange)
    assert answer.request_headers.response.clear_route_cache


@pytest.mark.parametrize(
    "extra", [{"upgrade": "websocket", "connection": "Upgrade"}, {"content-type": "application/grpc"}]
)
def test_unbounded_requests_are_decided_on_their_headers(extra: dict[str, str]) -> None:
    exchange = Exchange()
    assert exchange.receive(headers(**extra)) == []
    assert exchange.state is State.DECIDING


def test_streamed_bodies_cannot_wait_so_headers_decide() -> None:
    exchange = Exchange()
    exchange.receive(headers(mode=ProcessingMode.STREAMED))
    assert exchange.state is State.DECIDING


def test_streamed_without_waiting_answers_headers_and_every_chunk() -> None:
    exchange = Exchange()
    assert exchange.receive(headers(mode=ProcessingMode.STREAMED, early=True)) == []
    assert exchange.receive(body(b"{", end=False)) == []
    assert exchange.receive(body(b"}")) == []
    assert exchange.body == b"{}"
    answer = decide(exchange)
    assert [part.WhichOneof("response") for part in answer] == [
        "request_headers",
        "request_body",
        "request_body",
    ]
    assert answer[0].request_headers.response.clear_route_cache


@pytest.mark.parametrize("size", [0, 1, 62_000, 62_001, 200_000])
def test_full_duplex_gives_back_every_byte(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    exchange = Exchange()
    assert exchange.receive(headers(mode=ProcessingMode.FULL_DUPLEX_STREAMED)) == []
    half = size // 2
    exchange.receive(body(data[:half], end=False))
    exchange.receive(body(data[half:]))
    answer = decide(exchange)
    assert answer[0].request_headers.response.clear_route_cache
    parts = [part.request_body.response.body_mutation.streamed_response for part in answer[1:]]
    assert b"".join(part.body for part in parts) == data
    assert [part.end_of_stream for part in parts] == [False] * (len(parts) - 1) + [True]


def test_full_duplex_with_trailers_ends_on_the_trailers() -> None:
    exchange = Exchange()
    exchange.receive(headers(mode=ProcessingMode.FULL_DUPLEX_STREAMED))
    exchange.receive(body(b"{}", end=False))
    exchange.receive(ep.ProcessingRequest(request_trailers=ep.HttpTrailers()))
    answer = decide(exchange)
    assert not answer[1].request_body.response.body_mutation.streamed_response.end_of_stream
    assert answer[-1].WhichOneof("response") == "request_trailers"


def test_full_duplex_with_a_spliced_body_sends_the_new_one() -> None:
    exchange = Exchange()
    exchange.receive(headers(mode=ProcessingMode.FULL_DUPLEX_STREAMED))
    exchange.receive(body(b"old"))
    answer = decide(exchange, b"newer")
    assert answer[1].request_body.response.body_mutation.streamed_response.body == b"newer"


def test_a_staying_exchange_passes_the_response_unchanged() -> None:
    exchange = Exchange(stay=True)
    exchange.receive(headers(end=True))
    decide(exchange)
    assert exchange.state is State.PASSING
    (passed,) = exchange.receive(ep.ProcessingRequest(response_headers=ep.HttpHeaders()))
    assert passed == ep.ProcessingResponse(response_headers=ep.HeadersResponse())
    assert exchange.response_seen


def test_a_staying_full_duplex_exchange_gives_back_response_bytes() -> None:
    exchange = Exchange(stay=True)
    first = headers(end=True)
    first.protocol_config.response_body_mode = ProcessingMode.FULL_DUPLEX_STREAMED
    first.protocol_config.request_body_mode = ProcessingMode.BUFFERED
    exchange.receive(first)
    decide(exchange)
    (passed,) = exchange.receive(
        ep.ProcessingRequest(response_body=ep.HttpBody(body=b"data: x", end_of_stream=True))
    )
    streamed = passed.response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"data: x", True)


def test_messages_out_of_order_are_an_error() -> None:
    with pytest.raises(ProtocolError):
        Exchange().receive(body(b"{}"))
    with pytest.raises(ProtocolError):
        Exchange().receive(ep.ProcessingRequest())


def test_an_id_is_made_when_the_gateway_gives_none() -> None:
    exchange = Exchange(new_id=lambda: "made")
    message = ep.ProcessingRequest()
    message.request_headers.end_of_stream = True
    exchange.receive(message)
    assert exchange.head is not None
    assert exchange.head.id == "made"


def test_a_verdict_answers_many_requests_and_a_replaced_body_stays_with_its_own() -> None:
    verdict = Verdict(ep.CommonResponse(clear_route_cache=True), ep.ProcessingResponse())
    answers = []
    for replaced in (None, b'{"model":"b"}', None):
        exchange = Exchange()
        exchange.receive(headers())
        exchange.receive(body(b"{}"))
        answers += exchange.answer(verdict, replaced)
    bodies = [answer.request_body.response.body_mutation.body for answer in answers]
    assert bodies == [b"", b'{"model":"b"}', b""]
    assert all(answer.request_body.response.clear_route_cache for answer in answers)
