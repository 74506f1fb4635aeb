"""What is limited, by how much: limits of the configuration, and which of them one request falls under.

Rules of this file: a limit belongs to a scope (everything, a model, a tenant, a tenant's use of a model, a route, a
client's address); a request must find room in every scope that has a limit for it. A scope's key is its identity over
reloads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.routing.tenant import Tenant

Key = tuple[str, str]
"""Kind and name of a scope: ``("tenant", "acme")``."""


@dataclass(slots=True, frozen=True)
class Limit:
    """Limits of one scope; None is no limit. ``burst_s``: how many seconds' worth may come at once."""

    rpm: float | None = None
    """Requests per minute."""
    tpm: float | None = None
    """Tokens per minute, prompt and output together."""
    tokens_per_day: float | None = None
    """Tokens per calendar day (UTC)."""
    concurrency: int | None = None
    """Requests running at once, from dispatch to the last byte."""
    burst_s: float = 60.0

    def __bool__(self) -> bool:
        """Whether anything is limited."""
        return not (
            self.rpm is None and self.tpm is None and self.tokens_per_day is None and self.concurrency is None
        )


Scopes = tuple[tuple[Key, Limit], ...]


@dataclass(slots=True, frozen=True)
class LimitRules:
    """All limits of one configuration."""

    everything: Limit = Limit()
    models: Mapping[str, Limit] = field(default_factory=dict)
    tenants: Mapping[str, Limit] = field(default_factory=dict)
    """Tenant -> its own limit, or its tier's."""
    tenant_models: Mapping[tuple[str, str], Limit] = field(default_factory=dict)
    """(tenant, model) -> limit."""
    routes: Mapping[str, Limit] = field(default_factory=dict)
    client: Limit = Limit()
    """Of every client address alike."""

    def scopes(self, tenant: Tenant, model: str, route: str) -> Scopes:
        """Scopes of a request that have a limit, the client's address left out."""
        found: tuple[tuple[Key, Limit | None], ...] = (
            (("tenant", tenant.name), self.tenants.get(tenant.name)),
            (("tenant_model", f"{tenant.name}/{model}"), self.tenant_models.get((tenant.name, model))),
            (("route", route), self.routes.get(route)),
            (("model", model), self.models.get(model)),
            (("global", ""), self.everything),
        )
        return tuple((key, limit) for key, limit in found if limit)
