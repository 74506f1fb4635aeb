"""What a pool does when its engines are full: the numbers of a preset, each of which a person may override."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(slots=True, frozen=True)
class Policy:
    """One pool's rules of waiting. Durations are seconds."""

    max_wait_s: float = 30.0
    """Longest wait in the queue; it ends at dispatch. 0: nothing waits, a full pool refuses at once."""
    max_ttft_s: float | None = None
    """An endpoint whose predicted wait for a first token is longer has no room; None: not asked."""
    max_kv_usage: float | None = 0.95
    """An endpoint whose KV cache is fuller has no room; None: not asked."""
    max_requests: int = 10_000
    """Requests that may wait."""
    max_bytes: int = 512 * 2**20
    """Body bytes that may wait."""
    min_share: float = 0.2
    """Share of the tokens that lower priorities, all together, are given while higher ones wait."""
    headroom: float = 0.2
    """Share of each endpoint's room that is kept for the highest priority, where tenants have several."""
    aging_s: float = 15.0
    """A request that has waited so long counts as one priority higher, never as the highest; 0: never."""
    order: str = "fair"
    """Within a priority: ``fair`` shares among tenants by weight, ``deadline`` serves the nearest deadline."""
    error_rate: float | None = 0.3
    """Share of failed requests that opens the pool's circuit; None: it stays closed."""
    fallback: str | None = None
    """Pool that answers when this one cannot in time; None: none."""
    fallback_after_s: float = 0.0
    """The fallback answers when the predicted wait is longer."""


PRESETS: Mapping[str, Policy] = MappingProxyType(
    {
        "shared": Policy(),
        "interactive": Policy(
            max_wait_s=10.0, max_ttft_s=2.0, max_kv_usage=0.9, aging_s=5.0, max_requests=2000
        ),
        "throughput": Policy(
            max_wait_s=120.0,
            max_kv_usage=0.98,
            headroom=0.0,
            aging_s=60.0,
            error_rate=None,
            max_requests=20_000,
        ),
        "batch": Policy(
            max_wait_s=600.0,
            max_kv_usage=0.98,
            headroom=0.0,
            aging_s=0.0,
            error_rate=None,
            max_requests=50_000,
            max_bytes=2**30,
        ),
    }
)
"""By name. ``shared`` is the default: many tenants on one fleet."""
DEFAULT_PRESET = "shared"
