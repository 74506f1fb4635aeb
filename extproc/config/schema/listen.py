"""Where extproc listens, and where Envoy's files are."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from extproc.config.address import parse_address
from extproc.config.schema.base import AddressText, Duration, FilePath, Section, wrong


class GrpcTls(Section):
    """Mutual TLS of the gRPC listener: only callers with a certificate of `client_ca` are served."""

    cert: FilePath
    """Certificate chain of extproc, PEM."""
    key: FilePath
    """Private key of `cert`, PEM."""
    client_ca: FilePath
    """CA that Envoy's client certificate must come from, PEM."""


class Listen(Section):
    """Sockets of extproc itself. Clients never talk to them: Envoy does, and operators."""

    grpc: AddressText = "unix:envoy/live/extproc.sock"
    """ext_proc, access log and health service for Envoy: `unix:PATH` or `HOST:PORT`."""
    grpc_allow_remote: bool = False
    """Explicit word that `grpc` may be reachable from other machines without mutual TLS."""
    grpc_tls: GrpcTls | None = None
    """Mutual TLS for `grpc`."""
    drain_notice: Duration = 0.0
    """How long extproc goes on deciding after SIGTERM. Alone behind an Envoy it had better be gone (and back) at
    once; where another takes over, `1.5s` let Envoy's health check notice first, and no request is refused."""
    admin: AddressText = "127.0.0.1:9902"
    """Admin HTTP: /metrics, /livez, /readyz, fleet, decisions."""
    admin_token_file: FilePath | None = None
    """File with the bearer token that admin requests which change something must carry. Beyond loopback such
    requests are refused without it."""

    @model_validator(mode="after")
    def _remote_needs_a_word(self) -> Self:
        if not (parse_address(self.grpc).is_local or self.grpc_allow_remote or self.grpc_tls):
            raise wrong(
                f"`grpc: {self.grpc}` can be reached from other machines: use a Unix socket or 127.0.0.1, "
                "or add `grpc_tls`, or `grpc_allow_remote: true` where the network is trusted"
            )
        return self


class Envoy(Section):
    """Files shared with Envoy."""

    clusters: FilePath = "envoy/clusters.yaml"  # type: ignore[assignment]
    """Engine clusters, edited by people; watched."""
    live: FilePath = "envoy/live"  # type: ignore[assignment]
    """Folder that Envoy reads its clusters from; written by extproc only."""
    admin: AddressText | None = "unix:envoy/live/envoy-admin.sock"
    """Envoy's admin address, asked whether new clusters have arrived before they are used; `null`: do not
    ask."""
