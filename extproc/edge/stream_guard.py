"""The stream guard's side of its ext_proc filter: pumps a :class:`GuardedStream` and keeps its time.

One filter of Envoy calls it (envoy/envoy.yaml), on the two routes that a request takes whose decision set the header
``x-gateway-guard``:

- ``first_token``: response body STREAMED, sent without waiting for the header's answer. The answer to the header is held
  until the first chunk, both are answered, and we leave: Envoy passes the rest by itself;
- ``whole_stream``: response body FULL_DUPLEX_STREAMED. Every chunk passes here and we never leave early (leaving such a
  stream loses tokens).

A 504 sent in place of a held header resets the engine's stream, and so does the early end of a full duplex stream: Envoy
then closes the connection, which is how engines learn to stop. Where there is no valid ticket, all passes untouched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ep_grpc

from extproc.api.request import Api, Dialect
from extproc.edge import answers
from extproc.edge.guard_ticket import GUARD, GuardTicket, read_ticket
from extproc.edge.guarded_stream import GuardedStream, Out
from extproc.routing.guard import GuardLevel
from extproc.routing.rejection import Rejection

TIMEOUT_REASON = "first_token_timeout"
_REQUEST_ID = "x-gateway-request-id"
_MARGIN_S = 5.0
"""Envoy's own patience ends so much later than the bound."""
_HEADER_GOES = ep.ProcessingResponse(response_headers=ep.HeadersResponse())
_BODY_GOES = ep.ProcessingResponse(response_body=ep.BodyResponse())
_UNBOUND = GuardTicket(GuardLevel.WHOLE_STREAM)

_Context: TypeAlias = grpc.aio.ServicerContext[ep.ProcessingRequest, ep.ProcessingResponse]


@dataclass(slots=True)
class GuardCounts:
    """Read by the metrics."""

    streams: int = 0
    """Streams under guard now."""
    total: int = 0
    chunks: int = 0
    events: dict[str, int] = field(default_factory=dict)
    """What happened -> how often: first_token_timeout, heartbeat, idle, total."""


class StreamGuard(ep_grpc.ExternalProcessorServicer):
    """Serves all guarded streams. ``on_event`` hears (request id, word): see :class:`GuardCounts`."""

    def __init__(
        self,
        on_event: Callable[[str, str], None] = lambda request_id, word: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = GuardCounts()
        self._on_event = on_event
        self._clock = clock

    async def Process(  # noqa: N802 - name given by the service
        self, _requests: object, context: _Context
    ) -> None:
        """One guarded request, from when it is sent to an engine."""
        self.counts.streams += 1
        self.counts.total += 1
        watch = _Watch(self._clock())
        try:
            if await self._until_first(watch, context) or not watch.duplex:
                return
            await self._whole(watch, context)
        finally:
            self.counts.streams -= 1

    async def _until_first(self, watch: _Watch, context: _Context) -> bool:
        """Read until the reply has begun (False), the bound has come or all is said (True)."""
        while True:
            due = watch.stream.due()
            try:
                async with asyncio.timeout_at(None if due is None else watch.loop_time(due, self._clock())):
                    message = await context.read()
            except TimeoutError:
                return await self._say(watch, watch.stream.tick(due or 0.0), context)
            if message is grpc.aio.EOF or await self._take(watch, message, context):
                return True
            if watch.begun:
                return False

    async def _whole(self, watch: _Watch, context: _Context) -> None:
        """The rest of a full duplex stream: a reader for the chunks, and here the clock."""
        reader = asyncio.create_task(self._read(watch, context))
        try:
            while True:
                due, now = watch.stream.due(), self._clock()
                await asyncio.wait({reader}, timeout=None if due is None else max(due - now, 0.001))
                if reader.done():
                    reader.result()
                    return
                async with watch.writing:
                    if await self._say(watch, watch.stream.tick(self._clock()), context):
                        return
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, watch: _Watch, context: _Context) -> None:
        while True:
            message = await context.read()
            if message is grpc.aio.EOF:
                return
            async with watch.writing:
                if await self._take(watch, message, context):
                    return

    async def _take(self, watch: _Watch, message: ep.ProcessingRequest, context: _Context) -> bool:
        """One message of Envoy; True when nothing more is to come."""
        part = message.WhichOneof("request")
        now = self._clock()
        if part == "request_headers":
            headers = _headers(message.request_headers)
            watch.duplex = message.protocol_config.response_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
            ticket = read_ticket(headers.get(GUARD, "")) or _UNBOUND
            watch.id, watch.api = headers.get(_REQUEST_ID, ""), ticket.api
            watch.bound_s = ticket.first_s
            watch.stream = GuardedStream(ticket, watch.started)
            await context.write(ep.ProcessingResponse(request_headers=ep.HeadersResponse()))
            return watch.bound_s is None and not watch.duplex
        if part == "response_headers":
            return await self._reply_headers(watch, message.response_headers, now, context)
        if part == "response_body":
            self.counts.chunks += 1
            watch.begun = True
            if not watch.duplex:
                await context.write(_HEADER_GOES)
                await context.write(_BODY_GOES)
                return True
            body = message.response_body
            return await self._say(watch, watch.stream.chunk(body.body, now, end=body.end_of_stream), context)
        if part == "response_trailers":
            await self._say(watch, watch.stream.trailers(), context)
            await context.write(ep.ProcessingResponse(response_trailers=ep.TrailersResponse()))
            return True
        return False

    async def _reply_headers(
        self, watch: _Watch, reply: ep.HttpHeaders, now: float, context: _Context
    ) -> bool:
        if reply.end_of_stream:
            await context.write(_HEADER_GOES)
            return True
        out = watch.stream.header(_headers(reply), now)
        watch.begun = out.header
        if watch.bound_s is not None and not watch.duplex:
            await context.write(_more_time(watch.bound_s))
        return await self._say(watch, out, context)

    async def _say(self, watch: _Watch, out: Out, context: _Context) -> bool:
        """Write what the stream says; True at its end."""
        if out.word:
            self.counts.events[out.word] = self.counts.events.get(out.word, 0) + 1
            self._on_event(watch.id, out.word)
        if out.timeout:
            await context.write(_timed_out(watch))
            return True
        if out.header:
            await context.write(_HEADER_GOES)
        if out.body or out.end:
            await context.write(_piece(out))
        return out.end


class _Watch:
    """What is known of one guarded request. Until its ticket is read there are no bounds."""

    __slots__ = ("api", "begun", "bound_s", "duplex", "id", "started", "stream", "writing")

    def __init__(self, started: float) -> None:
        self.started = started
        self.id = ""
        self.api = Api.CHAT
        self.duplex = True
        self.begun = False
        self.bound_s: float | None = None
        self.stream = GuardedStream(_UNBOUND, started)
        self.writing = asyncio.Lock()

    def loop_time(self, due: float, now: float) -> float:
        return asyncio.get_running_loop().time() + max(due - now, 0.0)


def _piece(out: Out) -> ep.ProcessingResponse:
    message = ep.ProcessingResponse()
    streamed = message.response_body.response.body_mutation.streamed_response
    streamed.body = out.body
    streamed.end_of_stream = out.end
    return message


def _more_time(bound_s: float) -> ep.ProcessingResponse:
    out = ep.ProcessingResponse()
    out.override_message_timeout.FromMilliseconds(round((bound_s + _MARGIN_S) * 1000))
    return out


def _timed_out(watch: _Watch) -> ep.ProcessingResponse:
    dialect = Dialect.ANTHROPIC if watch.api is Api.MESSAGES else Dialect.OPENAI
    message = f"The model sent no token within {watch.bound_s:g} seconds."
    rejected = Rejection(504, "server_error", TIMEOUT_REASON, message, TIMEOUT_REASON)
    return answers.rejection(rejected, dialect)


def _headers(headers: ep.HttpHeaders) -> dict[str, str]:
    return {
        item.key.lower(): item.raw_value.decode("utf-8", "replace") or item.value
        for item in headers.headers.headers
    }
