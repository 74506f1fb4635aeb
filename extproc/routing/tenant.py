"""Who is asking."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Tenant:
    """One paying or internal customer. Higher ``priority`` is served first; ``models`` None means all models."""

    name: str
    tier: str = "default"
    priority: int = 0
    models: frozenset[str] | None = None
    route: str | None = None
    """Default route of this tenant, by name."""
    weight: float = 1.0
    """Share among the tenants of the same priority when requests must wait."""
    max_wait_s: float | None = None
    """Longest wait in a queue; None: as the pool says."""
    fallback: bool = True
    """May be served by a pool's fallback pool."""

    def may_use(self, model: str) -> bool:
        """Whether the tenant's allowed models include ``model``."""
        return self.models is None or model in self.models


ANONYMOUS = Tenant("anonymous")
