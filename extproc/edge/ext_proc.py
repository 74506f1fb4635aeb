"""The ext_proc service: reads a request once, asks for a decision, answers, and leaves.

Each stream is an :class:`~extproc.edge.exchange.Exchange`; this file only pumps. Accounting sits in ``finally``: a client
that leaves while it waits here reaches no engine, and whatever was opened for it is closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ep_grpc

from extproc.admission.dispatcher import Decision
from extproc.api.encodings import DecodeError, decode
from extproc.api.parse import BadRequest, parse
from extproc.api.paths import classify
from extproc.api.request import Dialect, InferenceRequest, RequestHead
from extproc.edge import answers
from extproc.edge.exchange import REQUEST_ID, Exchange, State
from extproc.edge.gatekeeper import Hold
from extproc.edge.stream_feedback import StreamFeedback
from extproc.ledger import Ledger
from extproc.routing.rejection import Rejection, internal
from extproc.routing.tenant import Tenant

log = logging.getLogger(__name__)

_OFF_LOOP_BYTES = 1 << 20
"""Bodies from this size on are parsed in a thread: a megabyte takes about half a millisecond, odd JSON much longer."""
_READERS = 2
"""Threads that unpack and parse large bodies: more would only take the interpreter from the event loop, and hold more
unpacked bodies at once. What waits for them ends when its client leaves."""


@dataclass(slots=True, frozen=True)
class StreamLimits:
    """Bounds of what is held at once; beyond them requests are refused at once."""

    max_streams: int = 20_000
    max_buffered_bytes: int = 1 << 30
    max_plain_bytes: int = 64 << 20
    """Bytes that one compressed body may decode to."""
    brown_out_lag_s: float = float("inf")
    """When the event loop is later than this, prompts are left unread: requests go by model and load alone."""


@dataclass(slots=True)
class StreamCounts:
    """Gauges and running totals, read by the metrics."""

    in_flight: int = 0
    buffered_bytes: int = 0
    total: int = 0
    messages: int = 0
    cancelled: int = 0
    failed: int = 0
    brief: int = 0
    """Requests whose prompt was left unread because the loop was late."""


class ExtProcServicer(ep_grpc.ExternalProcessorServicer):
    """One instance serves all streams. ``identify`` says who asks, ``decide`` may wait (a queue), ``reply`` answers what
    we serve ourselves; ``on_read`` hears of a request that was read, and when its first message came."""

    def __init__(
        self,
        *,
        identify: Callable[[RequestHead, Any], Tenant | Rejection],
        decide: Callable[[InferenceRequest, Tenant, Hold], Awaitable[Decision | Rejection]],
        prepare: Callable[[InferenceRequest, bytes | None, Tenant], Awaitable[None]] | None = None,
        reply: Callable[[RequestHead, Tenant | Rejection], ep.ProcessingResponse | None],
        on_rejected: Callable[[InferenceRequest | None, Rejection, str], None],
        ledger: Ledger,
        answers: answers.Answers,
        limits: StreamLimits,
        feedback_by_stream: bool = False,
        on_read: Callable[[InferenceRequest, float], None] | None = None,
        lag: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = StreamCounts()
        self._readers = ThreadPoolExecutor(_READERS, "reader")
        self.limits = limits
        self._identify = identify
        self._decide = decide
        self._prepare = prepare
        self._reply = reply
        self._on_rejected = on_rejected
        self._ledger = ledger
        self._answers = answers
        self._stay = feedback_by_stream
        self._on_read = on_read
        self._lag = lag
        self._clock = clock

    async def Process(  # noqa: N802 - name given by the service
        self,
        _requests: object,
        context: grpc.aio.ServicerContext[ep.ProcessingRequest, ep.ProcessingResponse],
    ) -> None:
        """One request of a client. Returning ends the stream; Envoy then goes on by itself."""
        counts = self.counts
        counts.in_flight += 1
        counts.total += 1
        exchange = Exchange(stay=self._stay, new_id=lambda: str(uuid.uuid4()))
        visit = _Visit(self._clock() if self._on_read is not None else 0.0)
        try:
            await self._pump(exchange, visit, context)
        except asyncio.CancelledError:
            counts.cancelled += 1
            raise
        except Exception:
            counts.failed += 1
            log.exception(
                "ext_proc stream failed", extra={"request_id": exchange.head.id if exchange.head else ""}
            )
            if exchange.state is not State.PASSING:
                await context.write(self._refused(exchange.head, internal()))
        finally:
            counts.in_flight -= 1
            counts.buffered_bytes -= visit.held
            now = self._clock()
            if visit.feedback is not None:
                visit.feedback.finish(now)
            elif visit.lease_id and not visit.answered:
                self._ledger.drop(visit.lease_id, now)

    async def _pump(
        self,
        exchange: Exchange,
        visit: _Visit,
        context: grpc.aio.ServicerContext[ep.ProcessingRequest, ep.ProcessingResponse],
    ) -> None:
        counts = self.counts
        while True:
            message = await context.read()
            if message is grpc.aio.EOF:
                return
            counts.messages += 1
            if exchange.state is State.HEADERS and counts.in_flight > self.limits.max_streams:
                await context.write(
                    self._refused(exchange.head, _overloaded("too many requests are being read"))
                )
                return
            if visit.feedback is not None:
                visit.feedback.message(message, self._clock())
            for out in exchange.receive(message):
                await context.write(out)
            if exchange.state in (State.BODY, State.DECIDING):
                self._account(exchange, visit)
                if counts.buffered_bytes > self.limits.max_buffered_bytes:
                    await context.write(
                        self._refused(exchange.head, _overloaded("too many bytes are being read"))
                    )
                    return
            if exchange.state is State.DECIDING:
                answer = await self._answer(exchange, visit, context)
                # From here on Envoy may have it, even if a fast engine's end cancels us in the middle of writing: its
                # record says what became of the request.
                visit.answered = True
                for out in answer:
                    await context.write(out)
                self._release(visit)
            if exchange.state is State.DONE:
                return

    async def _answer(
        self,
        exchange: Exchange,
        visit: _Visit,
        context: grpc.aio.ServicerContext[ep.ProcessingRequest, ep.ProcessingResponse],
    ) -> list[ep.ProcessingResponse]:
        head = exchange.head
        assert head is not None
        tenant = self._identify(head, exchange.metadata)
        own = self._reply(head, tenant)
        if own is not None:
            return exchange.refuse(own)
        if isinstance(tenant, Rejection):
            unread = InferenceRequest(head, *classify(head.method, head.path))
            return exchange.refuse(self._refused(head, tenant, unread))

        async def hold(seconds: float) -> None:
            for out in exchange.hold(seconds):
                await context.write(out)

        request: InferenceRequest | None = None
        try:
            late = self._lag() > self.limits.brown_out_lag_s
            self.counts.brief += late
            request = await self._read(head, exchange.body, is_part=exchange.partial, brief=late)
            if request.plain is not None:
                visit.held += len(request.plain)
                self.counts.buffered_bytes += len(request.plain)
                if self.counts.buffered_bytes > self.limits.max_buffered_bytes:
                    overloaded = _overloaded("too many bytes are being read")
                    return exchange.refuse(self._refused(head, overloaded, request, tenant.name))
            if self._on_read is not None:
                self._on_read(request, visit.began)
            if self._prepare is not None:
                await self._prepare(request, request.plain or exchange.body, tenant)
            decided = await self._decide(request, tenant, hold)
        except BadRequest as error:
            decided = error.rejection
        if isinstance(decided, Rejection):
            return exchange.refuse(self._refused(head, decided, request, tenant.name))
        assert request is not None
        visit.lease_id = decided.lease.id
        if self._stay:
            visit.feedback = StreamFeedback(self._ledger, decided.lease, self._clock())
        verdict = self._answers.decision(decided)
        body = None
        if exchange.body is not None:
            body = answers.spliced(decided, exchange.body, request.plain, request.model_span)
        if body is not None:
            verdict = answers.with_body(verdict, body, was_encoded=request.plain is not None)
            exchange.body = body
        return exchange.answer(verdict, body)

    async def _read(
        self, head: RequestHead, body: bytes | None, *, is_part: bool, brief: bool
    ) -> InferenceRequest:
        run = asyncio.get_running_loop().run_in_executor
        encoding = head.headers.get("content-encoding", "")
        plain = None
        # No coding begins with a brace: such a body only says that it is encoded, and most engines do not look.
        if body and encoding and encoding != "identity" and body[:1] != b"{":
            try:
                plain = await run(self._readers, decode, body, encoding, self.limits.max_plain_bytes)
            except DecodeError as error:
                # The engine may know an encoding that we do not; without the text the headers must do.
                log.info("body not decoded", extra={"request_id": head.id, "reason": str(error)})
        reading = partial(parse, head, body, plain, partial=is_part, brief=brief)
        if len(plain or body or b"") >= _OFF_LOOP_BYTES:
            return await run(self._readers, reading)
        return reading()

    def _refused(
        self,
        head: RequestHead | None,
        rejection: Rejection,
        request: InferenceRequest | None = None,
        tenant: str = "",
    ) -> ep.ProcessingResponse:
        self._on_rejected(request, rejection, tenant)
        dialect = request.dialect if request is not None else _dialect(head)
        shown = head is not None and "id" in self._answers.response_headers
        return answers.rejection(rejection, dialect, [(REQUEST_ID, head.id)] if head and shown else [])

    def _account(self, exchange: Exchange, visit: _Visit) -> None:
        held = exchange.held_bytes
        self.counts.buffered_bytes += held - visit.held
        visit.held = held

    def _release(self, visit: _Visit) -> None:
        self.counts.buffered_bytes -= visit.held
        visit.held = 0


class _Visit:
    """What one stream has open with us."""

    __slots__ = ("answered", "began", "feedback", "held", "lease_id")

    def __init__(self, began: float) -> None:
        self.began = began
        self.held = 0
        self.lease_id = ""
        self.answered = False
        self.feedback: StreamFeedback | None = None


def _dialect(head: RequestHead | None) -> Dialect:
    return classify(head.method, head.path)[1] if head is not None else Dialect.OPENAI


def _overloaded(why: str) -> Rejection:
    return Rejection(
        429,
        "rate_limit_error",
        "overloaded",
        f"The gateway is saturated: {why}.",
        "saturated",
        retry_after_s=1.0,
    )
