"""The smallest processor and log sink that Envoy's configuration can be tested with. Not the gateway."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ep_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

_LIMIT = 80 * 1024 * 1024


@dataclass(slots=True)
class Stub(ep_grpc.ExternalProcessorServicer, als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc]
    """Sends every request to ``groups`` (one cluster an attempt) and ``hosts``; or answers ``reject``."""

    groups: Sequence[str] = ()
    hosts: str = ""
    reject: tuple[int, bytes, str] | None = None
    shown: dict[str, str] = field(default_factory=dict)
    """Metadata of the namespace ``gateway``: what becomes response headers."""
    requests: list[dict[str, str]] = field(default_factory=list)
    """Headers of every request seen."""
    records: list[tuple[str, Any]] = field(default_factory=list)
    """``(log name, HTTPAccessLogEntry)``."""
    messages: int = 0

    async def Process(self, _requests: object, context: Any) -> None:  # noqa: N802 - name given by the service
        while True:
            message = await context.read()
            if message is grpc.aio.EOF:
                return
            part = message.WhichOneof("request")
            if part.startswith("response_"):
                # The guard's filters see replies that Envoy makes before it asked them anything: let them pass.
                return
            self.messages += 1
            if message.HasField("request_headers"):
                headers = {
                    item.key: item.raw_value.decode() for item in message.request_headers.headers.headers
                }
                self.requests.append(headers)
                if not (message.request_headers.end_of_stream or "upgrade" in headers):
                    await context.write(ep.ProcessingResponse(request_headers=ep.HeadersResponse()))
                    continue
                await context.write(self._answer("request_headers"))
                return
            if message.HasField("request_body"):
                await context.write(self._answer("request_body"))
                return

    def _answer(self, phase: str) -> ep.ProcessingResponse:
        out = ep.ProcessingResponse()
        if self.reject is not None:
            out.immediate_response.status.code = self.reject[0]
            out.immediate_response.body = self.reject[1]
            out.immediate_response.details = self.reject[2]
            return out
        common = getattr(out, phase).response
        common.clear_route_cache = True
        cluster = common.header_mutation.set_headers.add()
        cluster.header.key = "x-gateway-cluster"
        cluster.header.raw_value = (self.groups[0] if self.groups else "none").encode()
        hosts = common.header_mutation.set_headers.add()
        hosts.header.key = "x-gateway-destination-endpoint"
        hosts.header.raw_value = self.hosts.encode()
        for name, value in (
            ("x-envoy-retry-on", "retriable-status-codes"),
            ("x-envoy-retriable-status-codes", "503"),
        ):
            word = common.header_mutation.set_headers.add()
            word.header.key, word.header.raw_value = name, value.encode()
        balance: dict[str, Any] = {
            "priority_groups": [
                {"name": str(place), "clusters": [{"cluster_name": name, "weight": 1}]}
                for place, name in enumerate(self.groups)
            ]
        }
        if self.hosts:
            balance["x-gateway-destination-endpoint"] = self.hosts
        out.dynamic_metadata.update({"envoy.lb": balance, "gateway": dict(self.shown)})
        return out

    async def StreamAccessLogs(self, requests: Any, _context: Any) -> Any:  # noqa: N802 - name given by the service
        name = ""
        async for message in requests:
            name = message.identifier.log_name or name
            self.records += [(name, entry) for entry in message.http_logs.log_entry]
        return als_pb2.StreamAccessLogsResponse()

    def logged(self, name: str) -> list[Any]:
        """The records of one log: ``request`` or ``attempt``."""
        return [entry for log_name, entry in self.records if log_name == name]


@contextlib.asynccontextmanager
async def running_stub(address: str) -> AsyncIterator[Stub]:
    """Serve a stub on ``address`` (``unix:/path`` or ``host:port``), answering health checks too."""
    stub = Stub()
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", _LIMIT)])
    ep_grpc.add_ExternalProcessorServicer_to_server(stub, server)
    als_pb2_grpc.add_AccessLogServiceServicer_to_server(stub, server)
    checks = health.aio.HealthServicer()
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield stub
    finally:
        await server.stop(0)
