"""Clients that Envoy's own filters recognise: claims of a JWT, and the client of an API key that Envoy knows."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

from extproc.edge.bootstrap import connection_manager
from tests.gateway.gateway_process import chat, running_lab

SECRET = b"thirty-two bytes of shared secret"
TYPE = "type.googleapis.com/envoy.extensions.filters.http."


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def jwt(**claims: object) -> str:
    """A token signed with HMAC-SHA256 (RFC 7519)."""
    parts = b64(json.dumps({"alg": "HS256", "kid": "k"}).encode()) + "." + b64(json.dumps(claims).encode())
    return parts + "." + b64(hmac.new(SECRET, parts.encode(), hashlib.sha256).digest())


def first(filter_config: dict[str, Any]) -> Any:
    """For ``change=``: this filter before all others."""

    def change(document: dict[str, Any]) -> None:
        connection_manager(document)["http_filters"].insert(0, filter_config)

    return change


JWT_FILTER = {
    "name": "envoy.filters.http.jwt_authn",
    "typed_config": {
        "@type": TYPE + "jwt_authn.v3.JwtAuthentication",
        "providers": {
            "ours": {
                "issuer": "tests",
                "payload_in_metadata": "payload",
                "local_jwks": {
                    "inline_string": json.dumps(
                        {"keys": [{"kty": "oct", "alg": "HS256", "kid": "k", "k": b64(SECRET)}]}
                    )
                },
            }
        },
        "rules": [{"match": {"prefix": "/"}, "requires": {"provider_name": "ours"}}],
    },
}


async def test_the_claims_of_a_token_name_the_tenant(tmp_path: Path) -> None:
    settings = {
        "identity": {"claims": "envoy.filters.http.jwt_authn:payload.sub"},
        "tenants": {"acme": {"clients": "acme-app", "limits": {"rpm": 1}}},
    }
    async with running_lab(tmp_path, ["e"], settings=settings, change=first(JWT_FILTER)) as lab:
        known = f"Bearer {jwt(iss='tests', sub='acme-app')}"
        assert (await lab.post(chat(), authorization=known))[0] == 200
        assert "authorization" not in lab["e"].posts[0].headers
        # The tenant's limit, not just anybody.
        assert (await lab.post(chat(), authorization=known))[0] == 429
        stranger = await lab.post(chat(), authorization=f"Bearer {jwt(iss='tests', sub='other')}")
        assert (stranger[0], json.loads(stranger[2])["error"]["code"]) == (401, "invalid_api_key")
        # Envoy itself refuses a forged one.
        assert (await lab.post(chat(), authorization=known[:-3] + "AAA"))[0] == 401


API_KEYS = {
    "name": "envoy.filters.http.api_key_auth",
    "typed_config": {
        "@type": TYPE + "api_key_auth.v3.ApiKeyAuth",
        "credentials": [{"key": "envoy-key", "client": "acme-app"}],
        "key_sources": [{"header": "Authorization"}],
        "forwarding": {"header": "x-gateway-client", "hide_credentials": True},
    },
}


async def test_the_client_of_a_key_that_envoy_knows_is_the_tenant(tmp_path: Path) -> None:
    settings = {"identity": {"header": "x-gateway-client"}, "tenants": {"acme": {"clients": "acme-app"}}}
    async with running_lab(tmp_path, ["e"], settings=settings, change=first(API_KEYS)) as lab:
        assert (await lab.post(chat(), authorization="Bearer envoy-key"))[0] == 200
        assert (await lab.post(chat(), authorization="Bearer wrong", x_gateway_client="acme-app"))[0] == 401
