"""Speaks to an external processor directly, as Envoy would: ext_proc streams and access log records, no
Envoy between.

Rules of this file:

- messages are those that Envoy 1.40 sends with ``request_body_mode: BUFFERED`` and the access log of
  ``envoy/envoy.yaml``;
- every request has its own ``x-gateway-request-id``; a record with that id is what ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc_grpc

from loadtest.stage import MODEL

REQUEST_ID = "x-gateway-request-id"
RECORDS_A_MESSAGE = 25
"""What fits in Envoy's buffer of 16 KiB."""


def headers(request_id: str, body_bytes: int) -> ext_proc.ProcessingRequest:
    """The request headers of a chat completion."""
    pairs = {
        ":method": "POST",
        ":path": "/v1/chat/completions",
        ":authority": "gateway",
        ":scheme": "http",
        "content-type": "application/json",
        "content-length": str(body_bytes),
        "user-agent": "loadtest",
        "accept": "*/*",
        REQUEST_ID: request_id,
    }
    found = base_pb2.HeaderMap(
        headers=[base_pb2.HeaderValue(key=key, raw_value=value.encode()) for key, value in pairs.items()]
    )
    return ext_proc.ProcessingRequest(request_headers=ext_proc.HttpHeaders(headers=found))


def body(content: bytes) -> ext_proc.ProcessingRequest:
    """The whole body."""
    return ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=content, end_of_stream=True))


def prompt(size: int) -> bytes:
    """A chat completion request of about that many bytes."""
    return b'{"model":"%s","messages":[{"role":"user","content":"%s"}]}' % (
        MODEL.encode(),
        b"word " * (size // 5),
    )


def end_record(
    request_id: str, cluster: str, port: int, *, left: bool = False
) -> accesslog_pb2.HTTPAccessLogEntry:
    """The record that ends a request: complete, or its client ``left``."""
    entry = accesslog_pb2.HTTPAccessLogEntry()
    common = entry.common_properties
    common.access_log_type = accesslog_pb2.DownstreamEnd
    common.upstream_cluster = cluster
    common.upstream_remote_address.socket_address.address = "127.0.0.1"
    common.upstream_remote_address.socket_address.port_value = port
    common.start_time.GetCurrentTime()
    common.duration.FromMilliseconds(800)
    common.time_to_first_upstream_tx_byte.FromMilliseconds(1)
    common.time_to_last_upstream_rx_byte.FromMilliseconds(799)
    common.upstream_request_attempt_count = 1
    common.custom_tags["ttft_us"] = "120000"
    if left:
        common.response_flags.downstream_connection_termination = True
    else:
        common.metadata.filter_metadata["usage"].update({"input": 1000, "output": 16})
        common.metadata.filter_metadata["gateway"].update(
            {"endpoint": f"127.0.0.1:{port}", "pool": "loadtest"}
        )
    entry.request.request_method = base_pb2.POST
    entry.request.path = "/v1/chat/completions"
    entry.request.request_headers[REQUEST_ID] = request_id
    entry.response.response_code.value = 200
    entry.response.response_body_bytes = 2_400
    entry.response.response_code_details = "downstream_remote_disconnect" if left else "via_upstream"
    return entry


class ProcessorClient:
    """One gRPC connection to a processor."""

    def __init__(self, socket_path: Path) -> None:
        self._channel = grpc.aio.insecure_channel(f"unix:{socket_path}")
        self._processor = ext_proc_grpc.ExternalProcessorStub(self._channel)
        self._log = als_pb2_grpc.AccessLogServiceStub(self._channel)

    def open(self) -> Any:
        """A new ext_proc stream (a ``grpc.aio`` stream-stream call)."""
        return self._processor.Process()

    def open_log(self) -> Any:
        """A new access log stream (a ``grpc.aio`` stream-unary call)."""
        return self._log.StreamAccessLogs()

    async def decide(self, request_id: str, content: bytes) -> str:
        """One whole exchange; returns the cluster the processor chose, empty if it refused."""
        call = self.open()
        await call.write(headers(request_id, len(content)))
        await call.read()
        await call.write(body(content))
        answer = await call.read()
        await call.done_writing()
        await call.read()
        for option in answer.request_body.response.header_mutation.set_headers:
            if option.header.key == "x-gateway-cluster":
                return str(option.header.raw_value.decode())
        return ""

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()


def messages(entries: Sequence[accesslog_pb2.HTTPAccessLogEntry]) -> list[als_pb2.StreamAccessLogsMessage]:
    """Records in messages as Envoy batches them; only the first says who it is."""
    made = []
    for start in range(0, len(entries), RECORDS_A_MESSAGE):
        message = als_pb2.StreamAccessLogsMessage()
        if not start:
            message.identifier.log_name = "request"
            message.identifier.node.id = "loadtest"
        message.http_logs.log_entry.extend(entries[start : start + RECORDS_A_MESSAGE])
        made.append(message)
    return made
