"""What is written down of every request: metrics, the decision record, the decision log, a trace, a line in the log.

Rules of this file: the dispatcher reports before the lease is opened, the ledger after it is settled, the servicer what it
refused; a request has one record, whichever came first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from extproc.admission.dispatcher import Considered
from extproc.api.request import InferenceRequest
from extproc.config.schema import Settings
from extproc.edge.decision_log import DecisionLog
from extproc.edge.logs import request_line
from extproc.edge.traces import Tracing
from extproc.ledger import Settlement
from extproc.routing.rejection import Rejection
from extproc.telemetry.decision import DecisionRecord, record_of, record_of_rejection
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.ring import DecisionRing

log = logging.getLogger(__name__)


class Journal:
    """Hears of decisions, refusals and settlements. ``clock`` gives monotonic seconds."""

    def __init__(self, settings: Settings, metrics: Metrics, clock: Callable[[], float]) -> None:
        said, traced = settings.decisions, settings.tracing
        self.metrics = metrics
        self.ring = DecisionRing(said.ring)
        self.decision_log = (
            DecisionLog(said.log, max_bytes=said.log_max_bytes, files=said.log_files) if said.log else None
        )
        self.tracing = (
            Tracing(traced.endpoint, traced.sample_ratio, follow_clients=traced.follow_clients, clock=clock)
            if traced.endpoint is not None
            else None
        )
        self.log_requests = settings.logging.requests
        """A line for every request that ended; may change with a reload."""
        self._clock = clock

    def considered(self, considered: Considered, now: float) -> None:
        """A decision was made, or no endpoint was left to decide for."""
        took_s = self._clock() - now
        if considered.decision is not None:
            self.metrics.decided(considered.ranked, considered.strategy, took_s)
        self.ring.add(record_of(considered, time.time(), took_s * 1e6))
        if self.tracing is not None:
            self.tracing.traces.considered(considered, now)

    def rejected(self, request: InferenceRequest | None, rejection: Rejection, tenant: str = "") -> None:
        """We answered with an error; ``request`` is None when it was refused before it was read."""
        record = self.ring.find(request.id) if request is not None else None
        pool = record.pool if record is not None else ""
        # A refused name is whatever the client wrote: it must not become a label.
        model = request.model or "" if request is not None and pool else ""
        self.metrics.refused(pool, model, rejection.status, rejection.reason)
        if self.tracing is not None and request is not None:
            self.tracing.traces.refused(request.id, rejection)
        if request is not None and record is None:
            record = record_of_rejection(request, rejection, time.time(), tenant)
            self.ring.add(record)
        if record is not None:
            self._write(record)

    def settled(self, settlement: Settlement, now: float) -> None:
        """A lease was closed."""
        self.metrics.settled(settlement)
        if self.tracing is not None:
            self.tracing.traces.settled(settlement, now)
        record = self.ring.settle(settlement)
        if record is not None:
            self._write(record)

    async def close(self) -> None:
        """Write what is queued and stop."""
        if self.decision_log is not None:
            await asyncio.to_thread(self.decision_log.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.exporter.close)

    def _write(self, record: DecisionRecord) -> None:
        if self.decision_log is not None:
            self.decision_log.write(record)
        if self.log_requests:
            log.info("request", extra=request_line(record))
