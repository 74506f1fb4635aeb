"""How Envoy reaches a cluster by TLS, so that its /metrics is reached in the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTEXT = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"


@dataclass(slots=True, frozen=True)
class UpstreamTls:
    """Files as written in the cluster (relative ones are meant from Envoy's working directory); empty: not given."""

    ca_file: str = ""
    """Empty: Envoy does not verify the engine's certificate."""
    server_name: str = ""
    cert_file: str = ""
    key_file: str = ""


def upstream_tls(cluster: Any) -> UpstreamTls | None:
    """The TLS context of an Envoy ``Cluster`` message; None for clusters in plain text."""
    from envoy.extensions.transport_sockets.tls.v3 import tls_pb2

    config = cluster.transport_socket.typed_config
    if config.type_url != _CONTEXT:
        return None
    context = tls_pb2.UpstreamTlsContext()
    context.ParseFromString(config.value)
    common = context.common_tls_context
    certificate = common.tls_certificates[0] if common.tls_certificates else None
    return UpstreamTls(
        ca_file=common.validation_context.trusted_ca.filename,
        server_name=context.sni,
        cert_file=certificate.certificate_chain.filename if certificate is not None else "",
        key_file=certificate.private_key.filename if certificate is not None else "",
    )
