"""Every metric of the gateway, in one place, in one registry that is ours alone.

Rules of this file:

- the methods are called on the event loop, once an event; what mirrors state elsewhere is read when the page
  is written;
- label values come from the configuration or a fixed set; model names come from clients and are capped;
- series of a removed endpoint vanish at :meth:`Metrics.sweep`, called before each page;
- :meth:`Metrics.page` only reads and belongs in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    generate_latest,
)

from extproc.fleet.endpoint import Endpoint
from extproc.ledger import Settlement
from extproc.outcome import Usage
from extproc.scheduling.strategy import Choice
from extproc.telemetry.decision import reason_of
from extproc.telemetry.family import CappedLabel, Count, Family, Spread
from extproc.telemetry.fleet_series import FleetSeries
from extproc.telemetry.mirrored import MirroredSeries, Reading

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 60)
_DURATION = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600)
_DECISION = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
_LAG = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2)


class Metrics:
    """``endpoints`` is the fleet's own table, ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        clock: Callable[[], float],
        *,
        model_cap: int = 200,
        process: bool = True,
    ) -> None:
        registry = self.registry = CollectorRegistry()
        self.models = CappedLabel(model_cap)
        self.mirrored = MirroredSeries()
        self._endpoints = endpoints
        self._requests = Family(
            Count,
            "extproc_requests",
            "Requests that ended, refused ones included.",
            ("pool", "model", "code", "reason"),
        )
        self._decisions = Family(
            Count,
            "extproc_decisions",
            "Decisions for an endpoint, by strategy and by why: only_one, load, prefix, spill.",
            ("endpoint", "strategy", "reason"),
        )
        self._decision_seconds = Family(
            Spread.over(_DECISION), "extproc_decision_seconds", "Time of our own code per decision."
        )
        self._ttft = Family(
            Spread.over(_TTFT),
            "extproc_ttft_seconds",
            "Streamed requests: from the first byte sent to an engine to its first body byte.",
            ("pool", "model"),
        )
        self._duration = Family(
            Spread.over(_DURATION),
            "extproc_request_duration_seconds",
            "Where a request's time went: waiting (before it was sent), engine, proxying (the rest).",
            ("pool", "part"),
        )
        self._tokens = Family(
            Count,
            "extproc_tokens",
            "Tokens as engines reported them: input, cached (part of input), output.",
            ("pool", "model", "kind"),
        )
        self._no_usage = Family(
            Count,
            "extproc_requests_without_usage",
            "Successful generations whose token counts were not reported.",
            ("pool", "model"),
        )
        self._scrapes = Family(
            Count,
            "extproc_scrapes",
            "Scrapes: ok, refused, timeout, status, too_large, unreadable, broken, dns, tls.",
            ("endpoint", "result"),
        )
        self._config_generation = Gauge(
            "extproc_config_generation", "Number of the configuration in use, 1 at start.", registry=registry
        )
        self._reloads = Family(
            Count,
            "extproc_config_reloads",
            "Changes of the configuration files: applied, rejected (the old state stays).",
            ("result",),
        )
        for result in ("applied", "rejected"):
            # A counter that begins with its first event shows no increase by it.
            self._reloads.of(result)
        self._lag = Family(Spread.over(_LAG), "extproc_loop_lag_seconds", "How late the event loop woke up.")
        self._lag_worst = Gauge(
            "extproc_loop_lag_worst_seconds",
            "Longest delay of the event loop in the last ten seconds.",
            registry=registry,
        )
        self.fleet_series = FleetSeries(endpoints, clock)
        self.gauges = (self._config_generation, self._lag_worst)
        for family in self.families:
            registry.register(family)
        registry.register(self.fleet_series)
        registry.register(self.mirrored)
        if process:
            ProcessCollector(namespace="extproc", registry=registry)

    def bind(self, name: str, read: Callable[[], Reading]) -> None:
        """Show a number kept elsewhere; names are in ``mirrored.MIRRORED``."""
        self.mirrored.bind(name, read)

    def bind_caches(self, caches: Mapping[str, tuple[Callable[[], int], Callable[[], int]]]) -> None:
        """Show bounded maps: name -> (entries, cap)."""
        self.bind(
            "cache_entries", lambda: {(name,): float(entries()) for name, (entries, _) in caches.items()}
        )
        self.bind("cache_cap", lambda: {(name,): float(cap()) for name, (_, cap) in caches.items()})

    def decided(self, ranked: Sequence[Choice], strategy: str, seconds: float) -> None:
        """A decision was made for the first of ``ranked``; it took ``seconds`` of our time."""
        self._decisions.of(ranked[0].endpoint.key, strategy, reason_of(ranked)).inc()
        self._decision_seconds.of().observe(seconds)

    def refused(self, pool: str, model: str, status: int, reason: str) -> None:
        """We answered a request ourselves with an error."""
        self._requests.of(pool, self.models.of(model), str(status), reason).inc()

    def settled(self, settlement: Settlement) -> None:
        """A request that had a lease ended."""
        lease, end = settlement.lease, settlement.end
        pool, model = lease.pool, self.models.of(lease.model)
        status = str(end.status) if end is not None else "0"
        self._requests.of(pool, model, status, settlement.reason).inc()
        if end is None:
            return
        if lease.stream and end.ttft_s is not None:
            self._ttft.of(pool, model).observe(end.ttft_s)
        waiting, engine = end.waiting_s, end.engine_s
        if waiting is not None:
            self._duration.of(pool, "waiting").observe(waiting)
        if engine is not None:
            self._duration.of(pool, "engine").observe(engine)
        if waiting is not None and engine is not None:
            self._duration.of(pool, "proxying").observe(max(end.duration_s - waiting - engine, 0.0))
        if end.usage is not None:
            self._used(pool, model, end.usage)
        elif lease.api.generates and settlement.reason == "ok":
            self._no_usage.of(pool, model).inc()

    def scraped(self, endpoint: str, result: str) -> None:
        """A scrape of this endpoint ended."""
        if endpoint in self._endpoints:
            self._scrapes.of(endpoint, result).inc()

    def reloaded(self, generation: int, *, applied: bool) -> None:
        """The configuration changed, or a bad change was refused and ``generation`` stays."""
        self._reloads.of("applied" if applied else "rejected").inc()
        self._config_generation.set(generation)

    def lagged(self, seconds: float, worst: float) -> None:
        """The event loop woke up this late; ``worst`` of the last ten seconds."""
        self._lag.of().observe(seconds)
        self._lag_worst.set(worst)

    def sweep(self) -> None:
        """Forget series of endpoints that are gone."""
        live = frozenset(self._endpoints)
        self._decisions.keep("endpoint", live)
        self._scrapes.keep("endpoint", live)

    def page(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self.registry)

    @property
    def families(self) -> tuple[Family[Count] | Family[Spread], ...]:
        """What is counted here, event by event."""
        return (
            self._requests,
            self._decisions,
            self._decision_seconds,
            self._ttft,
            self._duration,
            self._tokens,
            self._no_usage,
            self._scrapes,
            self._reloads,
            self._lag,
        )

    def _used(self, pool: str, model: str, usage: Usage) -> None:
        for kind, count in (("input", usage.input), ("cached", usage.cached), ("output", usage.output)):
            if count:
                self._tokens.of(pool, model, kind).inc(count)


def catalogue(metrics: Metrics) -> list[tuple[str, str, tuple[str, ...], str]]:
    """(name, type, labels, help) of every metric defined here, sorted, as the documentation lists them."""
    own = [
        *((metric, family.labels) for family in metrics.families for metric in family.describe()),
        *((metric, ()) for gauge in metrics.gauges for metric in gauge.describe()),
    ]
    read = [
        (family, tuple(getattr(family, "_labelnames", ())))
        for collector in (metrics.fleet_series, metrics.mirrored)
        for family in collector.collect()
    ]
    return sorted(
        (
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            labels,
            family.documentation,
        )
        for family, labels in (*own, *read)
    )


def catalogue_table(metrics: Metrics) -> str:
    """The catalogue as a Markdown table."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | {kind} | {', '.join(labels)} | {text} |"
        for name, kind, labels, text in catalogue(metrics)
    ]
    return "\n".join(rows) + "\n"
