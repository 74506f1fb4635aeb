"""Who may ask for how much: tenants, tiers, how clients are recognised, limits."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from extproc.config.schema.base import Duration, Name, Names, Section, Table, Written, folder_of, wrong

_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")


def _secret(value: object, info: ValidationInfo) -> object:
    """``env:NAME`` or ``file:PATH``; relative paths are meant from the configuration's folder."""
    if isinstance(value, str) and value.startswith("env:") and len(value) > 4:
        return value
    if isinstance(value, str) and value.startswith("file:") and len(value) > 5:
        folder = folder_of(info)
        return value if folder is None else f"file:{folder / value[5:]}"
    raise wrong("a secret does not stand in the file itself; write `env:NAME` or `file:PATH`")


def _key(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str) and _SHA256.fullmatch(value.lower()):
        return value.lower()
    if isinstance(value, str) and value.startswith(("env:", "file:")):
        return _secret(value, info)
    raise wrong(
        "a key does not stand in the file itself; write `sha256:` and the 64 hex digits of its SHA-256 "
        "(`printf %s KEY | sha256sum`), or `env:NAME`, or `file:PATH`"
    )


Secret = Annotated[str, BeforeValidator(_secret), Written("secret")]
"""``env:NAME`` or ``file:PATH``."""
Key = Annotated[str, BeforeValidator(_key), Written("key")]


def _keys(value: object) -> object:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


Keys = Annotated[tuple[Key, ...], BeforeValidator(_keys), Written("key or list of keys")]


class TrafficLimit(Section):
    """Limits of one scope; what is not written is not limited."""

    rpm: Annotated[float, Field(gt=0)] | None = None
    """Requests per minute."""
    tpm: Annotated[float, Field(gt=0)] | None = None
    """Tokens per minute, prompt and output together."""
    tokens_per_day: Annotated[float, Field(gt=0)] | None = None
    """Tokens per calendar day (UTC)."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Requests running at once; further ones wait in the queue."""
    burst: Annotated[Duration, Field(ge=1)] = 60.0
    """How many seconds' worth of `rpm` and `tpm` may come at once."""


Limits = Annotated[dict[Name, TrafficLimit], Table]


class TierSettings(Section):
    """What tenants have in common."""

    priority: int = 0
    """Requests of a higher priority are served first."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share among the tenants of one priority when requests must wait."""
    models: Names | None = None
    """Models that may be used, by the names clients use; `null`: all."""
    route: Name | None = None
    """Route of requests that no other route matches."""
    max_wait: Duration | None = None
    """Longest wait in a queue; `null`: as the pool says."""
    fallback: bool = True
    """May be answered by a pool's `fallback_pool`."""
    limits: TrafficLimit = TrafficLimit()
    """Limits of each tenant."""
    model_limits: Limits = Field(default_factory=dict)
    """Model: limits of each tenant's use of it."""


class TenantSettings(Section):
    """One customer. What is `null` is as its tier says."""

    keys: Keys = ()
    """API keys: `sha256:HEX` of the key, `env:NAME` or `file:PATH` (a key a line). Clients send one as
    `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    clients: Names = ()
    """Names that Envoy vouches for: see `identity`."""
    tier: Name | None = None
    """Tier; `null`: the one called `default`, where there is one."""
    priority: int | None = None
    """Requests of a higher priority are served first."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share among the tenants of one priority when requests must wait."""
    models: Names | None = None
    """Models that may be used, by the names clients use."""
    route: Name | None = None
    """Route of requests that no other route matches."""
    max_wait: Duration | None = None
    """Longest wait in a queue."""
    fallback: bool | None = None
    """May be answered by a pool's `fallback_pool`."""
    limits: TrafficLimit | None = None
    """Limits of this tenant, in place of its tier's."""
    model_limits: Limits = Field(default_factory=dict)
    """Model: limits of this tenant's use of it, beside its tier's for other models."""

    @model_validator(mode="after")
    def _can_come(self) -> Self:
        if not self.keys and not self.clients:
            raise wrong("nobody can be this tenant: give it `keys`, or `clients` that Envoy vouches for")
        return self


class IdentitySettings(Section):
    """How clients are recognised beside their keys. Only what Envoy itself sets is believed."""

    claims: Names = ()
    """Where in Envoy's metadata a client's name stands, as `NAMESPACE:key.key`; for JWTs
    `envoy.filters.http.jwt_authn:payload.sub`."""
    header: Name | None = None
    """Header in which a filter of Envoy names the client (`api_key_auth` does); it must begin with
    `x-gateway-`, which clients cannot send."""
    client_certificate: bool = False
    """Believe `x-forwarded-client-cert`: Envoy must say `forward_client_cert_details: SANITIZE_SET`."""
    anonymous: Name | None = None
    """Tier of requests without any credential; `null`: they are refused with 401."""

    @field_validator("claims")
    @classmethod
    def _has_a_path(cls, claims: tuple[str, ...]) -> tuple[str, ...]:
        for claim in claims:
            namespace, _, path = claim.rpartition(":")
            if not namespace or not all(path.split(".")):
                raise wrong(
                    f"`{claim}` names no place; write like `envoy.filters.http.jwt_authn:payload.sub`"
                )
        return claims

    @field_validator("header")
    @classmethod
    def _not_forgeable(cls, header: str | None) -> str | None:
        if header is not None and not header.lower().startswith("x-gateway-"):
            raise wrong(f"clients could send `{header}` themselves; use a name that begins with `x-gateway-`")
        return header.lower() if header is not None else None


class RedisSettings(Section):
    """The shared store of limits (Redis or Valkey)."""

    url: Annotated[str, Field(pattern=r"^(rediss?|valkeys?|unix)://.+")] = "redis://127.0.0.1:6379/0"
    """Address; a password may be given by `password`."""
    password: Secret | None = None
    """`env:NAME` or `file:PATH`."""
    timeout: Annotated[Duration, Field(ge=0.001, le=1)] = 0.005
    """Longest time a request waits for the store."""
    on_failure: Literal["open", "closed"] = "open"
    """While the store does not answer: `open` serves without limits, `closed` refuses with 503."""
    prefix: str = "extproc:"
    """Begins every key in the store."""


class RateLimits(Section):
    """Limits beside those of tenants and routes. A request must find room in all that concern it."""

    total: TrafficLimit = TrafficLimit()
    """All requests together."""
    models: Limits = Field(default_factory=dict)
    """Model, by the name the engines know: limits of all its requests."""
    client: TrafficLimit = TrafficLimit()
    """Every client address."""
    store: Literal["memory", "redis"] = "memory"
    """Where `rpm`, `tpm` and `tokens_per_day` are counted: in this process, or in a store that several
    gateways share. `concurrency` is each process's own."""
    redis: RedisSettings = RedisSettings()
    """The shared store."""


Tenants = Annotated[dict[Name, TenantSettings], Table]
Tiers = Annotated[dict[Name, TierSettings], Table]
