"""Feedback from the ext_proc stream itself, for gateways without an access log for us (``feedback: stream``).

The stream is kept to its end. What it can tell: the status and the first body byte (if the gateway sends response parts),
and the end. It cannot tell a client that left from a clean end unless the end of the body was shown; such an end is neutral.
"""

from __future__ import annotations

from envoy.service.ext_proc.v3 import external_processor_pb2 as ep

from extproc.ledger import Lease, Ledger
from extproc.outcome import End


class StreamFeedback:
    """Collects what the response phase shows of one lease and closes it."""

    def __init__(self, ledger: Ledger, lease: Lease, now: float) -> None:
        self._ledger = ledger
        self._lease = lease
        self._decided_at = now
        self._status = 0
        self._ttft_s: float | None = None
        self._bytes = 0
        self._ended = False

    def message(self, message: ep.ProcessingRequest, now: float) -> None:
        """One message of the response phase; others are ignored."""
        part = message.WhichOneof("request")
        if part == "response_headers":
            self._status = _status(message.response_headers)
            self._ended = message.response_headers.end_of_stream
        elif part == "response_body":
            body = message.response_body
            self._bytes += len(body.body)
            self._ended = self._ended or body.end_of_stream
            if self._ttft_s is None and body.body:
                self._ttft_s = now - self._decided_at
        elif part == "response_trailers":
            self._ended = True

    def finish(self, now: float) -> None:
        """The stream is over: close the lease."""
        endpoint = self._lease.endpoint
        self._ledger.ended(
            End(
                self._lease.id,
                endpoint.spec.cluster,
                endpoint.spec.address,
                self._status or 200,
                flags=() if self._ended else ("DC",),
                ttft_s=self._ttft_s,
                engine_s=now - self._decided_at,
                duration_s=now - self._decided_at,
                response_bytes=self._bytes,
            ),
            now,
        )


def _status(headers: ep.HttpHeaders) -> int:
    for header in headers.headers.headers:
        if header.key == ":status":
            value = (header.raw_value.decode() if header.raw_value else header.value) or "0"
            return int(value) if value.isdecimal() else 0
    return 0
