"""Sends spans to an OpenTelemetry collector (OTLP over HTTP), with OpenTelemetry's own exporter.

Rules of this file: the event loop only puts finished traces into a bounded queue; turning them into OTLP and sending is a
thread's work; what does not fit or cannot be sent is dropped and counted; requests never wait. Headers, certificates and
proxies of the exporter come from the environment (``OTEL_EXPORTER_OTLP_*``), so no secret stands in the configuration.

The OpenTelemetry packages are an extra (``otel``) and are imported only where an endpoint is configured.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from extproc import __version__
from extproc.telemetry.spans import Kind, Span, Traces

log = logging.getLogger(__name__)

_KINDS = {Kind.SERVER: SpanKind.SERVER, Kind.CLIENT: SpanKind.CLIENT, Kind.INTERNAL: SpanKind.INTERNAL}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_BATCH = 64
"""Traces sent at once, some six spans each."""
_PATIENCE_S = 2.0
"""Longest time that a finished trace waits for others."""


class TraceExporter:
    """``finished`` takes the spans of one trace. ``endpoint`` is the whole address."""

    def __init__(self, endpoint: str, *, queued: int = 2_000, timeout_s: float = 5.0) -> None:
        self.counts = {"exported": 0, "failed": 0, "dropped": 0}
        """Spans by what became of them."""
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s)
        self._resource = Resource.create({SERVICE_NAME: "extproc", SERVICE_VERSION: __version__})
        self._scope = InstrumentationScope("extproc", __version__)
        self._wall_minus_monotonic = time.time() - time.monotonic()
        self._queue: queue.Queue[tuple[Span, ...] | None] = queue.Queue(queued)
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def finished(self, spans: tuple[Span, ...]) -> None:
        """Queue the spans of one trace. Never waits."""
        try:
            self._queue.put_nowait(spans)
        except queue.Full:
            self.counts["dropped"] += len(spans)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued and stop; whatever takes longer than ``timeout_s`` is lost."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)
        # Ends the exporter's own retries, if it is still at them.
        self._exporter.shutdown()

    def _run(self) -> None:
        open_ = True
        while open_:
            batch, open_ = self._next_batch()
            if not batch:
                continue
            # Wall clocks are set now and then: spans of one batch agree with the clock of that moment.
            self._wall_minus_monotonic = time.time() - time.monotonic()
            spans = [self._readable(span) for trace in batch for span in trace]
            try:
                sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
            except Exception:
                log.exception("spans could not be sent")
                sent = False
            self.counts["exported" if sent else "failed"] += len(spans)
            if not sent and not self._failed:
                log.warning("the collector of traces does not take them; requests go on")
            self._failed = not sent

    def _next_batch(self) -> tuple[list[tuple[Span, ...]], bool]:
        batch: list[tuple[Span, ...]] = []
        first = self._queue.get()
        if first is None:
            return batch, False
        batch.append(first)
        until = time.monotonic() + _PATIENCE_S
        while len(batch) < _BATCH:
            try:
                trace = self._queue.get(timeout=max(until - time.monotonic(), 0.0))
            except queue.Empty:
                break
            if trace is None:
                return batch, False
            batch.append(trace)
        return batch, True

    def _readable(self, span: Span) -> ReadableSpan:
        parent = None
        if span.parent_id:
            parent = SpanContext(span.trace_id, span.parent_id, is_remote=span.kind is Kind.SERVER)
        events = []
        if span.first_token_s is not None:
            events.append(Event("first_token", timestamp=self._nanoseconds(span.first_token_s)))
        return ReadableSpan(
            span.name,
            SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=_SAMPLED),
            parent,
            self._resource,
            attributes=span.attributes,
            events=events,
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=self._nanoseconds(span.start_s),
            end_time=self._nanoseconds(span.end_s),
            instrumentation_scope=self._scope,
        )

    def _nanoseconds(self, monotonic_s: float) -> int:
        return round((monotonic_s + self._wall_minus_monotonic) * 1e9)


class Tracing:
    """Traces of this process, and where they go."""

    def __init__(
        self, endpoint: str, ratio: float, *, follow_clients: bool, clock: Callable[[], float]
    ) -> None:
        self.exporter = TraceExporter(endpoint)
        self.traces = Traces(
            ratio, random.Random(), clock, self.exporter.finished, follow_clients=follow_clients
        )
