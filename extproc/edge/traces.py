"""Sends spans to an OpenTelemetry collector (OTLP over HTTP).

Rules of this file: the event loop only puts finished traces into a bounded queue; encoding and sending is a thread's work;
what does not fit or cannot be sent is dropped and counted, never sent twice; requests never wait. Headers and certificate
authorities come from OpenTelemetry's usual environment variables, so no secret stands in the configuration.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from urllib.parse import unquote

from extproc import __version__
from extproc.edge.otlp import encode
from extproc.telemetry.spans import Span, Traces, Value

log = logging.getLogger(__name__)

_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
_CERTIFICATE = "OTEL_EXPORTER_OTLP_CERTIFICATE"
_ATTRIBUTES = "OTEL_RESOURCE_ATTRIBUTES"
_BATCH = 64
"""Traces sent at once, some seven spans each."""
_PATIENCE_S = 2.0
"""Longest time that a finished trace waits for others."""


class TraceExporter:
    """``finished`` takes the spans of one trace. ``endpoint`` is the whole address.

    Raises:
        OSError: the file of certificates cannot be read.
    """

    def __init__(self, endpoint: str, *, queued: int = 2_000, timeout_s: float = 5.0) -> None:
        self.counts = {"exported": 0, "failed": 0, "dropped": 0}
        """Spans by what became of them."""
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._headers = {**_pairs(_HEADERS), "content-type": "application/x-protobuf"}
        authority = os.environ.get(_CERTIFICATE)
        self._tls = ssl.create_default_context(cafile=authority) if endpoint.startswith("https:") else None
        self._resource: Mapping[str, Value] = {
            "service.name": "extproc",
            "service.version": __version__,
            **_pairs(_ATTRIBUTES),
        }
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

    def _run(self) -> None:
        more = True
        while more:
            batch, more = self._next_batch()
            if not batch:
                continue
            spans = [span for trace in batch for span in trace]
            try:
                self._send(spans)
            except Exception as error:
                self.counts["failed"] += len(spans)
                if not self._failed:
                    log.warning(
                        "spans could not be sent", extra={"endpoint": self._endpoint, "reason": str(error)}
                    )
                self._failed = True
            else:
                self.counts["exported"] += len(spans)
                self._failed = False

    def _send(self, spans: list[Span]) -> None:
        # Wall clocks are set now and then: the spans of a batch agree with the clock of this moment.
        body = encode(spans, self._resource, __version__, time.time() - time.monotonic())
        asked = urllib.request.Request(self._endpoint, body, self._headers, method="POST")
        with urllib.request.urlopen(asked, timeout=self._timeout_s, context=self._tls) as reply:
            reply.read(1 << 16)

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


class Tracing:
    """Traces of this process, and where they go."""

    def __init__(
        self, endpoint: str, ratio: float, *, follow_clients: bool, clock: Callable[[], float]
    ) -> None:
        self.exporter = TraceExporter(endpoint)
        self.traces = Traces(
            ratio, random.Random(), clock, self.exporter.finished, follow_clients=follow_clients
        )


def _pairs(variable: str) -> dict[str, str]:
    """``name=value,name=value`` as OpenTelemetry writes them, values in URL encoding."""
    pairs = (pair.partition("=") for pair in os.environ.get(variable, "").split(",") if "=" in pair)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}
