"""Envoy's gRPC access log: what became of the requests we decided.

One servicer takes both logs: ``request`` (one record at the end of a request and one a minute while it runs) and ``attempt``
(one record for each failed attempt). Reading a record is plain field access; the ledger does the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
from envoy.config.core.v3.base_pb2 import Metadata
from envoy.data.accesslog.v3 import accesslog_pb2 as al
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from google.protobuf.duration_pb2 import Duration

from extproc.edge import token_usage
from extproc.edge.exchange import REQUEST_ID
from extproc.outcome import End, FailedAttempt, Renewal, Usage

log = logging.getLogger(__name__)

TOKEN_USAGE = "envoy.ai.token_usage"
"""Namespace of ai_protocol_manager's typed metadata."""

_UPSTREAM_END = al.UpstreamEnd
_PERIODIC = al.DownstreamPeriodic
_ENDS = frozenset({al.DownstreamEnd, al.NotSet})
_FLAGS = {
    "no_healthy_upstream": "UH",
    "upstream_request_timeout": "UT",
    "local_reset": "LR",
    "upstream_remote_reset": "UR",
    "upstream_connection_failure": "UF",
    "upstream_connection_termination": "UC",
    "upstream_overflow": "UO",
    "no_route_found": "NR",
    "rate_limited": "RL",
    "downstream_connection_termination": "DC",
    "downstream_remote_reset": "DR",
    "downstream_protocol_error": "DPE",
    "stream_idle_timeout": "SI",
    "upstream_max_stream_duration_reached": "UMSDR",
    "duration_timeout": "DT",
    "upstream_protocol_error": "UPE",
    "no_cluster_found": "NC",
    "overload_manager": "OM",
    "upstream_retry_limit_exceeded": "URX",
}


@dataclass(slots=True)
class LogCounts:
    """Running totals, read by the metrics."""

    streams: int = 0
    """Log streams open now."""
    broken: int = 0
    """Log streams that ended with an error."""
    records: int = 0
    unreadable: int = 0


class AccessLogServicer(als_pb2_grpc.AccessLogServiceServicer):
    """Turns records into events for ``on_event``, one call a record."""

    def __init__(
        self,
        on_event: Callable[[End | Renewal | FailedAttempt, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = LogCounts()
        self._on_event = on_event
        self._clock = clock

    async def StreamAccessLogs(  # noqa: N802 - name given by the service
        self,
        request_iterator: AsyncIterator[als_pb2.StreamAccessLogsMessage],
        context: grpc.aio.ServicerContext,
    ) -> als_pb2.StreamAccessLogsResponse:
        """Reads until Envoy ends the stream; a record that cannot be read is counted, never fatal."""
        self.counts.streams += 1
        clean = False
        try:
            async for message in request_iterator:
                self._take(message.http_logs.log_entry)
            clean = True
        finally:
            self.counts.streams -= 1
            if not clean:
                self.counts.broken += 1
        return als_pb2.StreamAccessLogsResponse()

    def _take(self, entries: object) -> None:
        now = self._clock()
        for entry in entries:  # type: ignore[attr-defined]
            self.counts.records += 1
            try:
                event = read(entry)
                if event is not None:
                    self._on_event(event, now)
            except Exception:
                self.counts.unreadable += 1
                log.exception("access log record not taken")


def read(entry: al.HTTPAccessLogEntry) -> End | Renewal | FailedAttempt | None:
    """The event that a record tells, or None for records that tell nothing (requests without an id, other log types)."""
    common = entry.common_properties
    request_id = entry.request.request_headers.get(REQUEST_ID, "")
    if not request_id:
        return None
    address = common.upstream_remote_address.socket_address
    host = address.address
    if host:
        host = f"[{host}]:{address.port_value}" if ":" in host else f"{host}:{address.port_value}"
    kind = common.access_log_type
    response = entry.response
    status = response.response_code.value
    if kind == _UPSTREAM_END:
        return FailedAttempt(request_id, common.upstream_cluster, host, status, _flags(common))
    ttft = common.custom_tags.get("ttft_us", "")
    ttft_s = int(ttft) / 1e6 if ttft.isdecimal() else None
    if kind == _PERIODIC:
        return Renewal(request_id, common.upstream_cluster, host, ttft_s, response.response_body_bytes)
    if kind not in _ENDS:
        return None
    has = common.HasField
    sent = _seconds(common.time_to_first_upstream_tx_byte) if has("time_to_first_upstream_tx_byte") else None
    last = _seconds(common.time_to_last_upstream_rx_byte) if has("time_to_last_upstream_rx_byte") else None
    return End(
        request_id,
        common.upstream_cluster,
        host,
        status,
        response.response_code_details,
        _flags(common) if has("response_flags") else (),
        ttft_s,
        last - sent if last is not None and sent is not None else None,
        sent,
        _seconds(common.duration),
        response.response_body_bytes,
        common.upstream_request_attempt_count or 1,
        _usage(common.metadata),
    )


def _flags(common: al.AccessLogCommon) -> tuple[str, ...]:
    return tuple(
        _FLAGS[field.name] for field, _ in common.response_flags.ListFields() if field.name in _FLAGS
    )


def _seconds(value: Duration) -> float:
    return float(value.seconds + value.nanos / 1e9)


def _usage(metadata: Metadata) -> Usage | None:
    typed = metadata.typed_filter_metadata
    if TOKEN_USAGE in typed and typed[TOKEN_USAGE].type_url.endswith(token_usage.TYPE_NAME):
        usage = token_usage.read(typed[TOKEN_USAGE].value)
        if usage is not None and (usage.input is not None or usage.output is not None):
            return usage
    told = metadata.filter_metadata
    if "usage" not in told:
        return None
    fields = told["usage"].fields

    def number(name: str) -> int | None:
        return token_usage.believed(fields[name].number_value) if name in fields else None

    return Usage(number("input"), number("output"), number("cached"))
