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
    other_names: frozenset[str] = frozenset()
    """Names that stand for models it may use: aliases, and names that routes replace."""

    def may_use(self, model: str) -> bool:
        """Whether the tenant's allowed models include ``model``."""
        return self.models is None or model in self.models

    def sees(self, name: str) -> bool:
        """Whether a list of models for the tenant names this one. Whether a request is let in is asked of what it comes
        to (:meth:`may_use`), since a name means what its pool and route make of it."""
        return self.may_use(name) or name in self.other_names


ANONYMOUS = Tenant("anonymous")
