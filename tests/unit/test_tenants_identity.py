"""Who asks: keys, what Envoy vouches for, and what no client can forge."""

from __future__ import annotations

import pytest

from extproc.api.request import RequestHead
from extproc.routing.identity import Claim, Identity, certificate_names, digest, presented_key
from extproc.routing.rejection import Rejection
from extproc.routing.tenant import ANONYMOUS, Tenant

ACME, BETA = Tenant("acme"), Tenant("beta")
JWT = Claim("envoy.filters.http.jwt_authn", ("payload", "sub"))


def head(**headers: str) -> RequestHead:
    return RequestHead(
        "r", "POST", "/v1/chat/completions", "", {k.replace("_", "-"): v for k, v in headers.items()}
    )


def identity(**more: object) -> Identity:
    said = {"keys": {digest("sk-1"): ACME}, "clients": {"beta-app": BETA}, "enabled": True, **more}
    return Identity(**said)  # type: ignore[arg-type]


def who(found: Tenant | Rejection) -> str:
    return found.name if isinstance(found, Tenant) else f"{found.status} {found.code}"


def test_without_tenants_everybody_is_anonymous() -> None:
    assert Identity().identify(head(authorization="Bearer x"), {}) is ANONYMOUS


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-1"},
        {"authorization": "bearer  sk-1 "},
        {"authorization": "sk-1"},
        {"x_api_key": "sk-1"},
        {"x_api_key": "sk-1", "authorization": "Bearer other"},
    ],
)
def test_a_key_in_either_header_is_known(headers: dict[str, str]) -> None:
    assert who(identity().identify(head(**headers), {})) == "acme"


@pytest.mark.parametrize(
    "headers", [{}, {"x_api_key": "sk-2"}, {"authorization": "Bearer "}, {"authorization": "Basic c2s="}]
)
def test_no_key_or_a_wrong_one_is_a_401(headers: dict[str, str]) -> None:
    assert who(identity().identify(head(**headers), {})) == "401 invalid_api_key"


def test_claims_are_read_from_envoys_metadata_only() -> None:
    metadata = {"envoy.filters.http.jwt_authn": {"payload": {"sub": "beta-app"}}}
    assert who(identity(claims=(JWT,)).identify(head(), metadata)) == "beta"
    assert who(identity().identify(head(), metadata)) == "401 invalid_api_key"
    assert who(identity(claims=(JWT,)).identify(head(sub="beta-app"), {})) == "401 invalid_api_key"
    odd = {"envoy.filters.http.jwt_authn": {"payload": ["beta-app"]}}
    assert who(identity(claims=(JWT,)).identify(head(), odd)) == "401 invalid_api_key"


def test_a_wrong_key_is_refused_even_when_something_vouches() -> None:
    metadata = {"envoy.filters.http.jwt_authn": {"payload": {"sub": "beta-app"}}}
    assert who(identity(claims=(JWT,)).identify(head(x_api_key="sk-2"), metadata)) == "401 invalid_api_key"


def test_headers_and_certificates_count_only_where_envoy_sets_them() -> None:
    named = head(x_gateway_client="beta-app")
    assert who(identity().identify(named, {})) == "401 invalid_api_key"
    assert who(identity(header="x-gateway-client").identify(named, {})) == "beta"
    certified = head(x_forwarded_client_cert='By=a;Hash=1;Subject="CN=x,O=y";URI=beta-app')
    assert who(identity().identify(certified, {})) == "401 invalid_api_key"
    assert who(identity(xfcc=True).identify(certified, {})) == "beta"


def test_who_may_come_without_a_key_is_the_anonymous_tier() -> None:
    guest = Tenant("anonymous", tier="guest")
    assert identity(anonymous=guest).identify(head(), {}) is guest
    assert who(identity(anonymous=guest).identify(head(x_api_key="sk-2"), {})) == "401 invalid_api_key"


def test_the_last_certificate_counts_with_quotes_understood() -> None:
    header = 'By=p;Subject="CN=first";URI=spiffe://old,Hash=2;Subject="/C=US;O=\\"A, B\\"/CN=c";URI=spiffe://new;DNS=d.x'
    assert certificate_names(header) == ["spiffe://new", "d.x", '/C=US;O="A, B"/CN=c']


def test_presented_keys() -> None:
    assert presented_key({}) is None
    assert presented_key({"authorization": "Bearer k"}) == "k"
    assert presented_key({"authorization": "k"}) == "k"
