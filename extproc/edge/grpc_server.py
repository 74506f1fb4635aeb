"""The gRPC server that Envoy talks to: ext_proc, access log, health and reflection on one Unix socket or address."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import grpc
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ep_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from extproc.config.address import parse_address
from extproc.config.schema.listen import Listen
from extproc.edge.access_log import AccessLogServicer

EXT_PROC = ep.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
ACCESS_LOG = als_pb2.DESCRIPTOR.services_by_name["AccessLogService"].full_name
LIVENESS, READINESS = "liveness", "readiness"
"""Names for the health service beside the service names themselves; "" is what Envoy asks."""


class GrpcServer:
    """Owns the server and what its health service says."""

    def __init__(
        self,
        listen: Listen,
        ext_proc: ep_grpc.ExternalProcessorServicer,
        access_log: AccessLogServicer,
        message_bytes: int,
    ) -> None:
        self._listen = listen
        self._inode = 0
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", message_bytes),
                ("grpc.max_send_message_length", message_bytes),
                ("grpc.so_reuseport", 0),
                ("grpc.max_concurrent_streams", 2**31 - 1),
            ]
        )
        ep_grpc.add_ExternalProcessorServicer_to_server(ext_proc, self._server)
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(access_log, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (EXT_PROC, ACCESS_LOG, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> None:
        """Bind and serve; not ready yet.

        Raises:
            OSError: the address cannot be bound.
        """
        address = parse_address(self._listen.grpc)
        if address.path:
            _remove_stale_socket(Path(address.path))
        try:
            tls = self._listen.grpc_tls
            if tls is None:
                self._server.add_insecure_port(self._listen.grpc)
            else:
                credentials = grpc.ssl_server_credentials(
                    [(tls.key.read_bytes(), tls.cert.read_bytes())],
                    root_certificates=tls.client_ca.read_bytes(),
                    require_client_auth=True,
                )
                self._server.add_secure_port(self._listen.grpc, credentials)
        except RuntimeError as error:
            raise OSError(f"{self._listen.grpc}: {error}") from error
        await self._server.start()
        if address.path:
            # Envoy may run as another user of the same group.
            os.chmod(address.path, 0o660)
            self._inode = os.stat(address.path).st_ino
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)

    async def set_ready(self, ready: bool) -> None:
        """What Envoy's health check hears; a process that is not ready gets no requests."""
        word = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", READINESS, EXT_PROC, ACCESS_LOG):
            await self._health.set(name, word)

    async def stop(self, grace_s: float) -> None:
        """Take no new streams, let open ones end for ``grace_s`` seconds."""
        await self._server.stop(grace_s)
        address = parse_address(self._listen.grpc)
        with contextlib.suppress(FileNotFoundError):
            # A successor may have put its own socket there by now.
            if address.path and os.stat(address.path).st_ino == self._inode:
                os.unlink(address.path)


def _remove_stale_socket(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(f"{path}: another extproc already listens there")
