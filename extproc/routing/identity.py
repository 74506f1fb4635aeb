"""Who is asking: a key of the client's, or what Envoy vouches for.

Rules of this file:

- a key is looked up by its SHA-256 digest: the time that takes says nothing about how much of a key was right;
- what Envoy vouches for comes from its own metadata (a JWT filter's claims), from a header that clients cannot send
  (``x-gateway-…``, which Envoy removes from requests before any filter), or from the client certificate header where
  the configuration says that Envoy sets it. No other header is believed;
- a key that is not known is refused, even when something else vouches for the client;
- without tenants everybody is anonymous and headers are left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from extproc.api.request import RequestHead
from extproc.routing.rejection import Rejection
from extproc.routing.tenant import ANONYMOUS, Tenant

CREDENTIALS = ("authorization", "x-api-key")
"""Headers that carry a client's key; removed before the engine when there are tenants."""
XFCC = "x-forwarded-client-cert"

Metadata = Mapping[str, object]
"""Envoy's dynamic metadata as plain values: namespace -> mapping."""


def digest(key: str) -> bytes:
    """What is remembered of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(slots=True, frozen=True)
class Claim:
    """Where in Envoy's metadata a client's name stands: a namespace and the keys below it."""

    namespace: str
    path: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class Identity:
    """Finds the tenant of a request."""

    keys: Mapping[bytes, Tenant] = field(default_factory=dict)
    """Digest of a key -> tenant."""
    clients: Mapping[str, Tenant] = field(default_factory=dict)
    """Name that Envoy vouches for -> tenant."""
    claims: Sequence[Claim] = ()
    header: str | None = None
    """Header of Envoy's that names the client, ``x-gateway-…``."""
    xfcc: bool = False
    """Envoy sets the client certificate header itself (``forward_client_cert_details: SANITIZE_SET``)."""
    anonymous: Tenant | None = None
    """Who comes without any credential; None: such requests are refused."""
    enabled: bool = False
    """There are tenants."""

    def identify(self, head: RequestHead, metadata: Metadata) -> Tenant | Rejection:
        """The tenant, or 401."""
        if not self.enabled:
            return ANONYMOUS
        key = presented_key(head.headers)
        if key is not None:
            tenant = self.keys.get(digest(key))
            if tenant is not None:
                return tenant
            # A token that Envoy's own filter has checked may stand in the same header.
            vouched = self._vouched(head, metadata) if not self.keys else None
            return vouched or _unauthorized("Incorrect API key provided.")
        return (
            self._vouched(head, metadata)
            or self.anonymous
            or _unauthorized(
                "You didn't provide an API key: send `Authorization: Bearer KEY` or `x-api-key`."
            )
        )

    @property
    def namespaces(self) -> frozenset[str]:
        """Metadata namespaces that are read."""
        return frozenset(claim.namespace for claim in self.claims)

    def _vouched(self, head: RequestHead, metadata: Metadata) -> Tenant | None:
        for claim in self.claims:
            value: object = metadata.get(claim.namespace)
            for step in claim.path:
                value = value.get(step) if isinstance(value, Mapping) else None
            if isinstance(value, str) and value in self.clients:
                return self.clients[value]
        if self.header is not None and (named := head.headers.get(self.header, "")) in self.clients:
            return self.clients[named]
        if self.xfcc and (certificate := head.headers.get(XFCC)):
            for name in certificate_names(certificate):
                if name in self.clients:
                    return self.clients[name]
        return None


def presented_key(headers: Mapping[str, str]) -> str | None:
    """The key a client sent; None without one. ``x-api-key`` (Anthropic's) goes before ``Authorization``."""
    key = headers.get("x-api-key")
    if key:
        return key.strip()
    scheme, _, rest = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and rest.strip():
        return rest.strip()
    return rest.strip() or scheme or None


def certificate_names(header: str) -> list[str]:
    """URI, DNS and Subject of the client's own certificate: the last element of Envoy's header.

    Format: https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_conn_man/headers#x-forwarded-client-cert
    """
    fields = _split(_split(header, ",")[-1], ";")
    found = []
    for wanted in ("uri", "dns", "subject"):
        for part in fields:
            name, _, value = part.partition("=")
            if name.strip().lower() == wanted:
                found.append(value.strip().strip('"').replace('\\"', '"'))
    return found


def _split(text: str, separator: str) -> list[str]:
    """Split outside of double quotes."""
    parts, start, quoted = [], 0, False
    for at, character in enumerate(text):
        if character == '"' and (at == 0 or text[at - 1] != "\\"):
            quoted = not quoted
        elif character == separator and not quoted:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def model_not_allowed(model: str) -> Rejection:
    """403: the model exists, but not for this tenant."""
    return Rejection(
        403,
        "invalid_request_error",
        "model_not_allowed",
        f"This API key may not use the model `{model[:200]}`.",
        "model_not_allowed",
        param="model",
    )


def model_unreadable() -> Rejection:
    """403: the body may name any model, and this tenant may not use every one."""
    return Rejection(
        403,
        "invalid_request_error",
        "model_not_allowed",
        "The model cannot be read from this request body, and this API key may not use every model.",
        "model_not_allowed",
        param="model",
    )


def _unauthorized(message: str) -> Rejection:
    return Rejection(
        401,
        "invalid_request_error",
        "invalid_api_key",
        message,
        "invalid_api_key",
        headers=(("www-authenticate", "Bearer"),),
    )
