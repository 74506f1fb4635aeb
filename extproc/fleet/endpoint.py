"""One engine replica: what the configuration says of it, and what we have learnt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from extproc.engines.state import EngineState
from extproc.fleet.backlog import Backlog
from extproc.fleet.health import Health
from extproc.fleet.rates import Rates


class Role(StrEnum):
    """Prefill/decode disaggregation."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Lifecycle(StrEnum):
    """warming -> ready -> draining -> gone. Only ready endpoints get new requests."""

    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True, frozen=True)
class EndpointSpec:
    """An endpoint as declared: Envoy cluster + address. ``key`` is its stable identity across reloads."""

    cluster: str
    address: str
    """``host:port`` that Envoy connects to; an IP where several endpoints share the cluster."""
    pool: str
    models: tuple[str, ...] = ()
    version: str = ""
    engine: str = "vllm"
    weight: float = 1.0
    max_concurrency: int | None = None
    role: Role = Role.BOTH
    draining: bool = False
    metrics_path: str | None = None
    """None: the engine adapter's own."""
    metrics_port: int | None = None
    tls: bool = False
    kv_events_port: int | None = None
    listed: bool = False
    """Envoy must be told the address: the cluster has several endpoints behind an ``override_host`` policy."""
    locality: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """``cluster/host:port``."""
        return f"{self.cluster}/{self.address}"


class Endpoint:
    """Live state of one endpoint. Mutated only on the event loop's thread, by the ledger, the scraper and the fleet.

    ``slot`` is a small integer, unique among live endpoints and reused later: indexes use it as a bit position.
    ``generation`` grows when the engine restarts, so that whatever was known about its cache can be dropped.
    """

    __slots__ = (
        "backlog",
        "generation",
        "health",
        "key",
        "leases",
        "lifecycle",
        "max_leases_seen",
        "rates",
        "removed",
        "scrape_failures",
        "slot",
        "spec",
        "state",
        "tick",
        "unstarted",
    )

    def __init__(self, spec: EndpointSpec, slot: int, prior_rate: float = 8000.0) -> None:
        self.spec = spec
        self.key = spec.key
        self.slot = slot
        self.generation = 0
        self.leases = 0
        """Open leases: requests decided for this endpoint and not yet ended."""
        self.unstarted = 0
        """Open leases whose first token has not come, as far as we know."""
        self.tick = 0
        """Order of the last decision for this endpoint: ties rotate to the one chosen longest ago."""
        self.health = Health()
        self.lifecycle = Lifecycle.DRAINING if spec.draining else Lifecycle.READY
        self.backlog = Backlog()
        self.rates = Rates(prior_rate)
        self.state: EngineState | None = None
        """The newest scrape, whatever its age; None before the first."""
        self.scrape_failures = 0
        self.removed = False
        """No longer configured; open leases keep the object until they end."""

    def __repr__(self) -> str:
        return f"Endpoint({self.key}, leases={self.leases})"
