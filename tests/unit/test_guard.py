"""The stream guard without a socket: what goes to the client, and when."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.api.request import Api
from extproc.api.sse_ending import ending, finished
from extproc.config.schema.guard import GuardSettings
from extproc.edge.guard_ticket import GuardTicket, read_ticket, ticket_for
from extproc.edge.guarded_stream import HEARTBEAT, GuardedStream, State
from extproc.routing.guard import Guard, GuardLevel
from tests.unit.core_parts import request

SSE = {":status": "200", "content-type": "text/event-stream; charset=utf-8"}
WHOLE = GuardLevel.WHOLE_STREAM
CHUNK = (
    b'data: {"id":"c1","object":"chat.completion.chunk","created":7,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
)


def stream(**bounds: float | Api | None) -> GuardedStream:
    return GuardedStream(GuardTicket(WHOLE, **bounds), 100.0)  # type: ignore[arg-type]


def events(body: bytes) -> list[dict[str, object]]:
    return [
        json.loads(line[6:])
        for line in body.splitlines()
        if line.startswith(b"data: ") and line != b"data: [DONE]"
    ]


class TestBeforeTheFirstToken:
    def test_the_header_is_held_until_the_first_chunk(self) -> None:
        guarded = stream(first_s=5.0)
        assert not guarded.header(SSE, 101.0).header
        out = guarded.chunk(CHUNK, 102.0, end=False)
        assert (out.header, out.body, out.end) == (True, CHUNK, False)

    def test_the_bound_runs_from_the_sending_and_ends_in_a_timeout(self) -> None:
        guarded = stream(first_s=5.0, heartbeat_s=1.0)
        guarded.header(SSE, 101.0)
        assert guarded.due() == 105.0
        assert not guarded.tick(104.9).timeout
        out = guarded.tick(105.0)
        assert (out.timeout, out.word, out.body) == (True, "first_token_timeout", b"")
        assert guarded.state is State.DONE

    def test_without_the_bound_the_header_goes_at_once_and_heartbeats_follow(self) -> None:
        guarded = stream(heartbeat_s=1.0)
        assert guarded.header(SSE, 101.0).header
        assert guarded.tick(102.0).body == HEARTBEAT


class TestWithinTheStream:
    def test_silence_brings_heartbeats_and_a_chunk_starts_it_anew(self) -> None:
        guarded = stream(heartbeat_s=2.0)
        guarded.header(SSE, 100.0)
        guarded.chunk(CHUNK, 101.0, end=False)
        assert guarded.tick(102.9).body == b""
        assert guarded.tick(103.0).body == HEARTBEAT
        assert guarded.due() == 105.0

    def test_heartbeats_do_not_hide_an_engine_that_stalls(self) -> None:
        guarded = stream(heartbeat_s=1.0, idle_s=3.0)
        guarded.header(SSE, 100.0)
        guarded.chunk(CHUNK, 100.0, end=False)
        assert [guarded.tick(100.0 + second).word for second in (1, 2, 3)] == [
            "heartbeat",
            "heartbeat",
            "idle",
        ]

    def test_the_total_bound_cuts_a_stream_that_talks(self) -> None:
        guarded = stream(total_s=10.0)
        guarded.header(SSE, 100.0)
        guarded.chunk(CHUNK, 109.9, end=False)
        out = guarded.tick(110.0)
        assert (out.end, out.word) == (True, "total")
        assert out.body.endswith(b"data: [DONE]\n\n")
        (last,) = events(out.body)
        assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
        assert (last["id"], last["created"], last["model"]) == ("c1", 7, "m")

    def test_a_heartbeat_never_falls_into_an_event(self) -> None:
        guarded = stream(heartbeat_s=1.0)
        guarded.header(SSE, 100.0)
        assert guarded.chunk(CHUNK + b"data: {", 100.0, end=False).body == CHUNK
        assert guarded.tick(101.0).body == HEARTBEAT
        assert guarded.chunk(b"}\n\n", 101.5, end=False).body == b"data: {}\n\n"

    def test_nothing_is_added_after_the_engines_last_event(self) -> None:
        guarded = stream(heartbeat_s=1.0, idle_s=1.0, total_s=1.0)
        guarded.header(SSE, 100.0)
        guarded.chunk(CHUNK + b"data: [DONE]\n\n", 100.0, end=False)
        assert guarded.due() is None

    def test_nothing_is_put_into_what_is_no_event_stream(self) -> None:
        for odd in ({"content-encoding": "gzip"}, {"content-type": "application/json"}, {":status": "500"}):
            guarded = stream(heartbeat_s=1.0, idle_s=2.0, total_s=3.0)
            guarded.header({**SSE, **odd}, 100.0)
            assert guarded.chunk(b"\x1f\x8b", 100.0, end=False).body == b"\x1f\x8b"
            assert guarded.due() is None

    def test_a_giant_event_goes_on_in_pieces(self) -> None:
        guarded = stream(heartbeat_s=1.0)
        guarded.header(SSE, 100.0)
        giant = b"data: " + b"x" * 300_000
        assert guarded.chunk(giant, 100.0, end=False).body == giant
        assert guarded.due() is None
        assert guarded.chunk(b"\n\n", 100.0, end=False).body == b"\n\n"
        assert guarded.due() == 101.0


@given(
    st.lists(st.sampled_from([b"data: x\n\n", b"data: y\r\n\r\n", b": c\n\n", b"da", b"\n", b"\r\n", b"z"]))
)
def test_the_bytes_as_a_whole_are_the_engines_however_they_are_cut(pieces: list[bytes]) -> None:
    guarded = stream(first_s=1.0, heartbeat_s=1.0)
    guarded.header(SSE, 100.0)
    out = b"".join(guarded.chunk(piece, 100.0, end=False).body for piece in pieces)
    out += guarded.chunk(b"", 100.0, end=True).body
    assert out == b"".join(pieces)


class TestEndings:
    def test_completions(self) -> None:
        (event,) = events(ending(Api.COMPLETIONS, b'data: {"id":"x","object":"text_completion"}'))
        assert event["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]
        assert event["id"] == "x"

    def test_messages(self) -> None:
        kinds = [event["type"] for event in events(ending(Api.MESSAGES, b""))]
        assert kinds == ["content_block_stop", "message_delta", "message_stop"]

    def test_responses(self) -> None:
        first = b'data: {"type":"response.created","response":{"id":"r","status":"in_progress"}}'
        (event,) = events(ending(Api.RESPONSES, first))
        assert event["response"] == {
            "id": "r",
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
        }

    def test_a_first_event_that_is_no_json_is_no_obstacle(self) -> None:
        assert ending(Api.CHAT, b"data: oops").endswith(b"data: [DONE]\n\n")

    def test_text_that_speaks_of_endings_ends_nothing(self) -> None:
        assert not finished(b'data: {"text":"data: [DONE] event: message_stop"}\n\n')
        assert finished(b"data: {}\n\ndata: [DONE]\n\n")
        assert finished(b"event: message_stop\ndata: {}\n\n")
        assert finished(b'event: response.completed\ndata: {"type":"response.completed"}\n\n')


class TestTicket:
    def test_it_survives_the_way_through_envoy(self) -> None:
        ticket = GuardTicket(WHOLE, Api.MESSAGES, 1.5, None, 3.0, 0.25)
        assert read_ticket(ticket.header()) == ticket

    @pytest.mark.parametrize("text", ["", "nothing", "first_token;first=x", "whole_stream;api=zzz"])
    def test_what_we_did_not_write_is_none(self, text: str) -> None:
        assert read_ticket(text) is None

    def test_the_total_grows_with_the_tokens_the_client_allows(self) -> None:
        guard = Guard(WHOLE, total_s=10.0, per_token_s=0.5)
        asked = request("id")
        asked.max_tokens = 100
        ticket = ticket_for(guard, asked)
        assert ticket is not None
        assert ticket.total_s == 60.0

    def test_replies_that_are_not_streamed_are_not_guarded(self) -> None:
        assert ticket_for(Guard(), request("id", stream=False)) is None


def test_a_guard_that_bounds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="bounds nothing"):
        GuardSettings.model_validate({"first_token": None})
