"""One engine replica: what the configuration says of it, and what we have learnt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from extproc.engines.state import EngineState
from extproc.fleet.backlog import Backlog
from extproc.fleet.counters import growth
from extproc.fleet.health import Health, HealthPolicy
from extproc.fleet.rates import Rates
from extproc.fleet.standstill import Standstill
from extproc.fleet.strangers import Strangers, number
from extproc.fleet.windows import Stats

_FRESH = 3.0
_WORTHLESS = 12.0
_FULL = 0.9
_MAX_ADAPTERS = 64
_GPU_KNOWN_S = 30.0


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
    """Where rank 0 publishes KV-cache events (ZeroMQ)."""
    kv_replay_port: int | None = None
    """Where rank 0 replays them; None: as the engine says, or not at all."""
    dcgm_url: str | None = None
    """Metrics page of the dcgm-exporter that watches the endpoint's GPUs."""
    dcgm_gpus: tuple[str, ...] = ()
    """Which GPUs of that page are the endpoint's, by number or UUID; none given: all of them."""
    listed: bool = False
    """Envoy must be told the address: the cluster has several endpoints behind an ``override_host``
    policy."""
    locality: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """``cluster/host:port``."""
        return f"{self.cluster}/{self.address}"


class Endpoint:
    """Live state of one endpoint. Mutated only on the event loop's thread, by the ledger, the scraper and the
    fleet.

    ``slot`` is a small integer, unique among live endpoints and reused later: indexes use it as a bit
    position. ``generation`` grows when the engine restarts, so that whatever was known about its cache can be
    dropped.
    """

    __slots__ = (
        "adapter_leases",
        "adapters",
        "backlog",
        "fresh_until",
        "generation",
        "gpu_utilization",
        "gpu_utilization_at",
        "health",
        "key",
        "leases",
        "lifecycle",
        "rates",
        "removed",
        "scrape_failures",
        "scrape_interval",
        "served",
        "slot",
        "spec",
        "standstill",
        "state",
        "stats",
        "strangers",
        "tick",
    )

    def __init__(
        self,
        spec: EndpointSpec,
        slot: int,
        prior_rate: float = 8000.0,
        policy: HealthPolicy | None = None,
    ) -> None:
        self.spec = spec
        self.key = spec.key
        self.slot = slot
        self.generation = 0
        self.leases = 0
        """Open leases: requests decided for this endpoint and not yet ended."""
        self.tick = 0
        """Order of the last decision for this endpoint: ties rotate to the one chosen longest ago."""
        self.health = Health(policy)
        self.lifecycle = Lifecycle.DRAINING if spec.draining else Lifecycle.READY
        self.backlog = Backlog()
        self.rates = Rates(prior_rate)
        self.stats = Stats()
        self.strangers = Strangers()
        self.standstill = Standstill()
        self.adapter_leases: dict[str, int] = {}
        """Adapter -> open leases for it."""
        self.adapters: dict[str, None] = {}
        """Adapters that were asked for here, the last one last: resident soon, whatever the last scrape said."""
        self.served: frozenset[str] | None = None
        """Models and adapters of its model list; None: it has not told."""
        self.scrape_interval = 1.0
        """Seconds between scrapes, smoothed."""
        self.fresh_until = float("-inf")
        """Until when the newest scrape counts in full."""
        self.state: EngineState | None = None
        """The newest scrape, whatever its age; None before the first."""
        self.scrape_failures = 0
        self.gpu_utilization: float | None = None
        """Of the endpoint's busiest GPU, 0..1, as DCGM last said, whatever the age. Shown; no decision uses it."""
        self.gpu_utilization_at = float("-inf")
        """When that was (monotonic seconds)."""
        self.removed = False
        """No longer configured; open leases keep the object until they end."""

    def __repr__(self) -> str:
        return f"Endpoint({self.key}, leases={self.leases})"

    def serves(self, model: str) -> bool:
        """Whether the endpoint may be asked for this model or adapter: declared, in its model list, resident, or
        nothing is known of what it serves."""
        declared, told = self.spec.models, self.served
        if model in declared or (told is not None and model in told):
            return True
        if not declared and told is None:
            return True
        state = self.state
        return state is not None and model in (state.running_adapters or ())

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that fit into the engine's KV cache; None when it did not say."""
        state = self.state
        if state is None or not state.kv_blocks or not state.block_size:
            return None
        return int(state.kv_blocks * state.block_size)

    def gpu_utilization_known(self, now: float) -> float | None:
        """Use of the endpoint's busiest GPU, 0..1; None where nobody told in the last 30 seconds."""
        return self.gpu_utilization if now - self.gpu_utilization_at <= _GPU_KNOWN_S else None

    def trust(self, now: float) -> float:
        """How much the newest scrape counts: 1 up to an age of three intervals, then falling to 0 at
        twelve."""
        if self.state is None:
            return 0.0
        intervals = (now - self.state.at) / self.scrape_interval
        return min(max((_WORTHLESS - intervals) / (_WORTHLESS - _FRESH), 0.0), 1.0)

    def observe(self, state: EngineState, previous: EngineState | None, now: float) -> None:
        """Learn from a scrape. ``previous`` is the one before, None after a restart. Sets ``state``."""
        was_busy = self.backlog.unstarted > 0 and self.backlog.level > 0.0
        still = self.standstill.observe(state, previous, self.leases - self.backlog.unstarted)
        self.backlog.observe(state, previous, now, self.rates.prefill_at(now), still=still)
        self.strangers.observe(state, previous, self.leases, self.backlog.unstarted)
        if previous is not None and state.at > previous.at:
            seconds = state.at - previous.at
            self.scrape_interval += (min(max(seconds, 0.05), 60.0) - self.scrape_interval) / 8
            computed = growth(previous, state, "computed_prompt_tokens_total")
            if computed is not None:
                usage = number(state.kv_usage)
                free = usage is None or usage < _FULL
                busy = was_busy and self.backlog.level > 0.0 and not self.backlog.estimated and free
                # Our own estimate alone would prove itself: too slow a rate keeps the backlog up, and a backlog
                # that never ends makes idle time look like slow work.
                busy = busy and 0.0 not in (number(previous.waiting), number(state.waiting))
                computed_work = computed * self.backlog.per_token
                self.rates.observe_counters(computed_work, seconds, busy, now)
                # Of one prompt an unknown part was computed before: engines count it when it is done.
                self.rates.observe_least((computed_work - self.backlog.largest) / seconds, now)
            generated = growth(previous, state, "generation_tokens_total")
            before, after = number(previous.running), number(state.running)
            if generated is not None and before is not None and after is not None:
                self.rates.observe_decode(
                    seconds, generated, (computed or 0.0) * self.backlog.per_token, (before + after) / 2
                )
        self.state = state
        self.fresh_until = state.at + _FRESH * self.scrape_interval

    def asked_for(self, adapter: str) -> None:
        """A request for this adapter was decided for the endpoint: the engine loads it."""
        self.adapters.pop(adapter, None)
        self.adapters[adapter] = None
        if len(self.adapters) > _MAX_ADAPTERS:
            del self.adapters[next(iter(self.adapters))]

    def adapter_leased(self, adapter: str, leases: int) -> None:
        """So many more (or fewer) open leases use this adapter."""
        count = self.adapter_leases.get(adapter, 0) + leases
        if count > 0:
            self.adapter_leases[adapter] = count
        else:
            self.adapter_leases.pop(adapter, None)
