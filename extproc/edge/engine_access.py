"""How we reach an engine ourselves (metrics, probes): with the TLS that its Envoy cluster has."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping

from extproc.config.cluster_tls import UpstreamTls
from extproc.edge.scraper import Access
from extproc.fleet.endpoint import EndpointSpec

log = logging.getLogger(__name__)


class EngineAccess:
    """Contexts by cluster, made once a configuration. Like Envoy: without a CA file the certificate is not verified."""

    def __init__(self) -> None:
        self._known: dict[str, Access] = {}

    def install(self, tls: Mapping[str, UpstreamTls]) -> None:
        """Take over a configuration. Files that cannot be read are logged; the cluster is then scraped unverified."""
        self._known = {
            name: Access(_context(name, said), said.server_name or None) for name, said in tls.items()
        }

    def __call__(self, spec: EndpointSpec) -> Access:
        """How to reach this endpoint."""
        return self._known.get(spec.cluster, _PLAIN)


_PLAIN = Access()


def _context(cluster: str, said: UpstreamTls) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        if said.ca_file:
            context.load_verify_locations(said.ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        if said.cert_file:
            context.load_cert_chain(said.cert_file, said.key_file or None)
    except (OSError, ssl.SSLError) as error:
        log.warning("TLS files not read", extra={"cluster": cluster, "reason": str(error)})
    return context
