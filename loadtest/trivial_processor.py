"""The least an external processor in Python can do: the baseline for the budgets.

    python -m loadtest.trivial_processor --listen 127.0.0.1:9100 --cluster engine-0 --endpoint 127.0.0.1:9001

It says the same messages as extproc (request headers: go on; request body: header mutation, dynamic
metadata, clear the route cache; then the stream ends) with one fixed target and no logic at all, and takes
access log records and drops them. So what extproc costs more than this is what deciding and accounting
cost, and what this costs more than a bare Envoy is what gRPC costs.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc_grpc
from google.protobuf import struct_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

_MAX_MESSAGE_BYTES = 96 * 2**20


def answer_headers() -> ext_proc.ProcessingResponse:
    """Go on, wait for the body."""
    return ext_proc.ProcessingResponse(
        request_headers=ext_proc.HeadersResponse(response=ext_proc.CommonResponse())
    )


def answer_body(cluster: str, endpoint: str) -> ext_proc.ProcessingResponse:
    """Target in a header and in metadata, route cache cleared: built anew each time, as a real decision
    must be."""
    metadata = struct_pb2.Struct()
    metadata.update(
        {
            "envoy.lb": {
                "priority_groups": [
                    {"name": "first", "clusters": [{"cluster_name": cluster, "weight": 1}]},
                    {"name": "second", "clusters": [{"cluster_name": cluster, "weight": 1}]},
                ],
                "x-gateway-destination-endpoint": endpoint,
            },
            "gateway": {"endpoint": endpoint, "pool": "loadtest", "reason": "static"},
        }
    )
    headers = ext_proc.HeaderMutation(
        set_headers=[
            base_pb2.HeaderValueOption(
                header=base_pb2.HeaderValue(key=key, raw_value=value.encode()),
                append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for key, value in (("x-gateway-cluster", cluster), ("x-gateway-destination-endpoint", endpoint))
        ]
    )
    return ext_proc.ProcessingResponse(
        request_body=ext_proc.BodyResponse(
            response=ext_proc.CommonResponse(header_mutation=headers, clear_route_cache=True)
        ),
        dynamic_metadata=metadata,
    )


class TrivialProcessor(ext_proc_grpc.ExternalProcessorServicer):
    """One fixed answer to everybody."""

    def __init__(self, cluster: str, endpoint: str) -> None:
        self._cluster = cluster
        self._endpoint = endpoint

    async def Process(  # noqa: N802
        self, request_iterator: object, context: grpc.aio.ServicerContext
    ) -> None:
        """Headers, body, end."""
        while True:
            request = await context.read()
            if request is grpc.aio.EOF:
                return
            kind = request.WhichOneof("request")
            if kind == "request_headers":
                await context.write(answer_headers())
                if request.request_headers.end_of_stream:
                    return
            elif kind == "request_body":
                await context.write(answer_body(self._cluster, self._endpoint))
                return
            else:
                return


class DroppingAccessLog(als_pb2_grpc.AccessLogServiceServicer):
    """Reads records and forgets them."""

    async def StreamAccessLogs(  # noqa: N802
        self,
        request_iterator: AsyncIterator[als_pb2.StreamAccessLogsMessage],
        context: grpc.aio.ServicerContext,
    ) -> als_pb2.StreamAccessLogsResponse:
        """Until Envoy ends the stream."""
        async for _ in request_iterator:
            pass
        return als_pb2.StreamAccessLogsResponse()


async def serve(listen: str, cluster: str, endpoint: str) -> None:
    """Serve on ``HOST:PORT`` or ``unix:PATH`` until SIGTERM or SIGINT."""
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)]
    )
    ext_proc_grpc.add_ExternalProcessorServicer_to_server(TrivialProcessor(cluster, endpoint), server)
    als_pb2_grpc.add_AccessLogServiceServicer_to_server(DroppingAccessLog(), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    for service in ("", "envoy.service.ext_proc.v3.ExternalProcessor"):
        await healthy.set(service, health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(listen)
    await server.start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    print("ready", flush=True)
    await stop.wait()
    await server.stop(grace=0.2)


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.trivial_processor",
        description="ext_proc server with one fixed answer (baseline)",
    )
    parser.add_argument("--listen", default="127.0.0.1:9100", help="HOST:PORT or unix:PATH")
    parser.add_argument("--cluster", required=True, help="Envoy cluster every request goes to")
    parser.add_argument("--endpoint", required=True, help="ip:port in that cluster")
    given = parser.parse_args()
    asyncio.run(serve(given.listen, given.cluster, given.endpoint))


if __name__ == "__main__":
    main()
