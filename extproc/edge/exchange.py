"""One ext_proc stream as a state machine: messages of Envoy in, messages to Envoy out, one decision in the middle.

Rules of this file (a "part" is headers, body or trailers; the body mode is told by ``protocol_config``, else BUFFERED):

    state    | message                                | what happens                                    | next
    ---------+----------------------------------------+-------------------------------------------------+---------
    HEADERS  | request_headers, nothing bounded to    | wait for the decision                           | DECIDING
             | read (end of stream, upgrade, gRPC,    |                                                 |
             | modes NONE and STREAMED)               |                                                 |
    HEADERS  | request_headers, BUFFERED(_PARTIAL)    | answer CONTINUE                                 | BODY
    HEADERS  | request_headers, FULL_DUPLEX_STREAMED, | say nothing yet                                 | BODY
             | or STREAMED without waiting            |                                                 |
    BODY     | request_body                           | keep it; whole body here -> wait for decision   | DECIDING
    BODY     | request_trailers                       | the body ended with trailers -> wait            | DECIDING
    DECIDING | :meth:`answer`                         | the decision goes out with the part it belongs  | PASSING
             |                                        | to, every held body byte is given back          | or DONE
    PASSING  | any further part of the request or the | pass it unchanged                               | PASSING
             | response                               |                                                 |

STREAMED lets the headers go on with the first answer, so nothing but the headers can decide there; only when Envoy sends
the body without waiting for the header answer is there a body to look at. BUFFERED_PARTIAL may show the first part of a
body only: then its model key and the headers decide, and the model cannot be replaced. In FULL_DUPLEX_STREAMED every byte
must be given back.
The stream ends after the answer unless the feedback comes by this stream (``stay``): Envoy goes on without us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep

from extproc.api.request import RequestHead

_NONE = ProcessingMode.NONE
_STREAMED = ProcessingMode.STREAMED
_BUFFERED = ProcessingMode.BUFFERED
_PARTIAL = ProcessingMode.BUFFERED_PARTIAL
_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED

REQUEST_ID = "x-gateway-request-id"
_OTHER_PSEUDO = (":scheme", ":protocol")
"""The pseudo headers that routing does not read; there are no others (RFC 9113, RFC 8441), and Envoy refuses them."""
_DUPLEX_CHUNK = 62_000
"""Bytes of one streamed answer: below the 64 KiB at which Envoy splits its own messages."""

_CONTINUE_HEADERS = ep.ProcessingResponse(request_headers=ep.HeadersResponse())
_CONTINUE_BODY = ep.ProcessingResponse(request_body=ep.BodyResponse())
_PASS = {
    "request_headers": ep.ProcessingResponse(request_headers=ep.HeadersResponse()),
    "request_body": _CONTINUE_BODY,
    "request_trailers": ep.ProcessingResponse(request_trailers=ep.TrailersResponse()),
    "response_headers": ep.ProcessingResponse(response_headers=ep.HeadersResponse()),
    "response_body": ep.ProcessingResponse(response_body=ep.BodyResponse()),
    "response_trailers": ep.ProcessingResponse(response_trailers=ep.TrailersResponse()),
}


class State(Enum):
    """Where the stream stands; see the table at the head of this file."""

    HEADERS = auto()
    BODY = auto()
    DECIDING = auto()
    PASSING = auto()
    DONE = auto()


class ProtocolError(Exception):
    """Envoy sent something that cannot follow what came before."""


class Verdict:
    """A decision as Envoy is told it: header mutation and dynamic metadata. One may answer many requests, so that its
    message on a buffered body, the usual one, is put together once; nobody changes a message made here."""

    __slots__ = ("_on_body", "metadata", "mutation")

    def __init__(self, mutation: ep.CommonResponse, metadata: ep.ProcessingResponse) -> None:
        self.mutation = mutation
        self.metadata = metadata
        self._on_body: ep.ProcessingResponse | None = None

    def on_headers(self) -> ep.ProcessingResponse:
        """As the answer to the request's headers."""
        out = ep.ProcessingResponse()
        out.MergeFrom(self.metadata)
        out.request_headers.response.MergeFrom(self.mutation)
        return out

    def on_body(self, body: bytes | None) -> ep.ProcessingResponse:
        """As the answer to the request's body, which ``body`` replaces where it is not None."""
        if body is None and self._on_body is not None:
            return self._on_body
        out = ep.ProcessingResponse()
        out.MergeFrom(self.metadata)
        out.request_body.response.MergeFrom(self.mutation)
        if body is None:
            self._on_body = out
        else:
            out.request_body.response.body_mutation.body = body
        return out


class Exchange:
    """See the rules above. ``body`` is what was read when the state is DECIDING; None when there is none to read."""

    def __init__(self, *, stay: bool = False, new_id: Callable[[], str] = lambda: "") -> None:
        self.state = State.HEADERS
        self.head: RequestHead | None = None
        self.body: bytes | None = None
        self.authority = ""
        self.stay = stay
        self.metadata: Any = None
        """Envoy's metadata context as it came with the headers; None: it sent none."""
        self.partial = False
        """More of the body is to come, and goes past us."""
        self.response_seen = False
        """The response phase began: the request was sent."""
        self._new_id = new_id
        self._mode = _BUFFERED
        self._response_mode = _NONE
        self._chunks: list[bytes] = []
        self._header_answered = False
        self._on_trailers = False
        self._pending_bodies = 0

    @property
    def held_bytes(self) -> int:
        """Body bytes read so far."""
        return sum(map(len, self._chunks)) if self.body is None else len(self.body)

    def receive(self, message: ep.ProcessingRequest) -> list[ep.ProcessingResponse]:
        """Take one message of Envoy; returns what to send now.

        Raises:
            ProtocolError: the message cannot follow what came before.
        """
        part = message.WhichOneof("request")
        if part is None:
            raise ProtocolError("an ext_proc message without a part")
        if self.state is State.HEADERS and part == "request_headers":
            return self._headers(message)
        if self.state is State.BODY and part == "request_body":
            return self._body(message.request_body)
        if self.state is State.BODY and part == "request_trailers":
            self._on_trailers = True
            return self._whole()
        if self.state is State.PASSING:
            return self._pass(part, message)
        raise ProtocolError(f"{part} cannot come in state {self.state.name}")

    def answer(self, verdict: Verdict, body: bytes | None = None) -> list[ep.ProcessingResponse]:
        """The decision; ``body`` replaces the client's bytes (model splice)."""
        if self.state is not State.DECIDING:
            raise ProtocolError(f"no answer is due in state {self.state.name}")
        self.state = State.PASSING if self.stay else State.DONE
        if self._mode == _DUPLEX and self.body is not None:
            return [verdict.on_headers(), *self._give_back(self.body if body is None else body)]
        if self._header_answered:
            return [verdict.on_body(body)]
        return [verdict.on_headers(), *([_CONTINUE_BODY] * self._pending_bodies)]

    def hold(self, seconds: float) -> list[ep.ProcessingResponse]:
        """Ask Envoy to wait so long for :meth:`answer`. Once only: Envoy ignores a second one and times out (504). In
        full duplex it waits without a bound anyway."""
        if self._mode == _DUPLEX:
            return []
        out = ep.ProcessingResponse()
        out.override_message_timeout.FromMilliseconds(int(seconds * 1000))
        return [out]

    def refuse(self, immediate: ep.ProcessingResponse) -> list[ep.ProcessingResponse]:
        """An immediate response ends the request in any state."""
        self.state = State.DONE
        return [immediate]

    def _headers(self, message: ep.ProcessingRequest) -> list[ep.ProcessingResponse]:
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        if message.HasField("metadata_context"):
            self.metadata = message.metadata_context
        headers = message.request_headers
        self.head = self._read_head(headers.headers.headers)
        early = message.protocol_config.send_body_without_waiting_for_header_response
        if headers.end_of_stream or self._mode == _NONE or (self._mode == _STREAMED and not early):
            self.state = State.DECIDING
            return []
        if self.head.has_no_bounded_body and self._mode != _DUPLEX:
            self.state = State.DECIDING
            return []
        self.state = State.BODY
        if self.head.has_no_bounded_body:
            # Full duplex without an end: decide now, give back every chunk as it comes.
            self.state = State.DECIDING
            self.stay = True
            return []
        if self._mode in (_BUFFERED, _PARTIAL):
            self._header_answered = True
            return [_CONTINUE_HEADERS]
        return []

    def _body(self, part: ep.HttpBody) -> list[ep.ProcessingResponse]:
        self._chunks.append(part.body)
        self._pending_bodies += 1
        self.partial = self._mode == _PARTIAL and not part.end_of_stream
        if part.end_of_stream or self._mode in (_BUFFERED, _PARTIAL):
            return self._whole()
        return []

    def _whole(self) -> list[ep.ProcessingResponse]:
        self.body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks = []
        self.state = State.DECIDING
        return []

    def _give_back(self, body: bytes) -> list[ep.ProcessingResponse]:
        out = []
        for start in range(0, max(len(body), 1), _DUPLEX_CHUNK):
            piece = ep.ProcessingResponse()
            streamed = piece.request_body.response.body_mutation.streamed_response
            streamed.body = body[start : start + _DUPLEX_CHUNK]
            streamed.end_of_stream = start + _DUPLEX_CHUNK >= len(body) and not self._on_trailers
            out.append(piece)
        if self._on_trailers:
            out.append(_PASS["request_trailers"])
        return out

    def _pass(self, part: str, message: ep.ProcessingRequest) -> list[ep.ProcessingResponse]:
        if part.startswith("response"):
            self.response_seen = True
        duplex = self._mode if part == "request_body" else self._response_mode
        if part in ("request_body", "response_body") and duplex == _DUPLEX:
            source: ep.HttpBody = getattr(message, part)
            out = ep.ProcessingResponse()
            streamed = getattr(out, part).response.body_mutation.streamed_response
            streamed.body = source.body
            streamed.end_of_stream = source.end_of_stream
            return [out]
        return [_PASS[part]]

    def _read_head(self, headers: Iterable[HeaderValue]) -> RequestHead:
        plain: dict[str, str] = {}
        for header in headers:
            raw = header.raw_value
            plain[header.key.lower()] = raw.decode("utf-8", "replace") if raw else header.value
        take = plain.pop
        for name in _OTHER_PSEUDO:
            take(name, "")
        self.authority = take(":authority", "")
        path, _, query = take(":path", "/").partition("?")
        identity = plain.get(REQUEST_ID) or self._new_id()
        return RequestHead(identity, take(":method", "GET"), path, query, plain)
