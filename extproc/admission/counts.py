"""Running totals of admission, read by the metrics. Names of tenants and pools come from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class AdmissionCounts:
    """See the fields."""

    waited: int = 0
    """Requests that had to wait."""
    cancelled: int = 0
    """Clients that left while they waited."""
    timeouts: int = 0
    """Requests whose deadline passed in the queue."""
    shed: int = 0
    """Requests that were taken out of a queue because they could not start in time, or to make place."""
    waits: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Pool -> (requests dispatched after waiting, seconds they waited)."""
    fallbacks: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """(pool, fallback pool, why) -> requests."""
    tokens: dict[str, float] = field(default_factory=dict)
    """Tenant -> tokens settled under a limit."""
    refusals: dict[tuple[str, str], int] = field(default_factory=dict)
    """(tenant, reason) -> requests refused."""

    def wait(self, pool: str, seconds: float) -> None:
        """A request was dispatched after waiting."""
        count, total = self.waits.get(pool, (0, 0.0))
        self.waits[pool] = (count + 1, total + seconds)

    def fell_back(self, pool: str, to: str, why: str) -> None:
        """A request went to a fallback pool."""
        key = (pool, to, why)
        self.fallbacks[key] = self.fallbacks.get(key, 0) + 1

    def used(self, tenant: str, tokens: float) -> None:
        """A request of the tenant was settled."""
        self.tokens[tenant] = self.tokens.get(tenant, 0.0) + tokens

    def refused(self, tenant: str, reason: str) -> None:
        """A request of the tenant was refused."""
        key = (tenant, reason)
        self.refusals[key] = self.refusals.get(key, 0) + 1
