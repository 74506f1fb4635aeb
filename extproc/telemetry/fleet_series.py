"""Metrics that mirror the fleet, read when someone asks for them and not kept on the hot path.

What is not known has no series: an engine that did not say its KV usage is absent here, not at zero. An
endpoint that is removed is gone from the next page on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.engines.registry import engine_named
from extproc.fleet.endpoint import Endpoint, Lifecycle
from extproc.fleet.health import Circuit

_ENDPOINT = ("endpoint", "pool")
_CIRCUITS = {Circuit.CLOSED: 0.0, Circuit.HALF_OPEN: 1.0, Circuit.OPEN: 2.0}

_GAUGES: tuple[tuple[str, str, Callable[[Endpoint, float], float | None]], ...] = (
    ("leases", "Requests decided for the endpoint and not yet ended.", lambda e, now: e.leases),
    (
        "unstarted",
        "Leases whose first token has not come, as far as known.",
        lambda e, now: e.backlog.unstarted,
    ),
    (
        "backlog_tokens",
        "Uncached prompt tokens not yet prefilled.",
        lambda e, now: e.backlog.tokens(now, e.rates.prefill),
    ),
    (
        "backlog_seconds",
        "Time to prefill the backlog at the learned rate.",
        lambda e, now: e.backlog.tokens(now, e.rates.prefill) / max(e.rates.prefill, 1e-9),
    ),
    ("prefill_tokens_per_second", "Learned prefill rate.", lambda e, now: e.rates.prefill),
    (
        "ready",
        "1 when the endpoint is not draining or warming.",
        lambda e, now: e.lifecycle is Lifecycle.READY,
    ),
    ("excluded", "1 while health keeps requests away.", lambda e, now: e.health.excluded(now)),
    (
        "circuit",
        "State of the circuit: 0 closed, 1 half-open (on trial), 2 open.",
        lambda e, now: _CIRCUITS[e.health.state(now)],
    ),
    (
        "busy",
        "1 while the endpoint rests because it said that it is busy.",
        lambda e, now: e.health.busy_until > now,
    ),
    (
        "error_share",
        "Share of failures in the window of the circuit.",
        lambda e, now: e.health.error_share(now),
    ),
    (
        "ttft_seconds",
        "Mean TTFT of streamed requests of the last minute.",
        lambda e, now: e.stats.minute.ttft_s(now),
    ),
    ("success_share", "Share of successes of the last minute.", lambda e, now: e.stats.minute.success(now)),
    (
        "engine_running",
        "Requests running, as the engine says.",
        lambda e, now: None if e.state is None else e.state.running,
    ),
    (
        "engine_waiting",
        "Requests waiting, as the engine says.",
        lambda e, now: None if e.state is None else e.state.waiting,
    ),
    (
        "engine_kv_usage",
        "Share of the KV cache in use, the fullest rank.",
        lambda e, now: None if e.state is None else e.state.kv_usage,
    ),
    ("engine_hit_share", "Share of prompt tokens found in the engine's cache.", lambda e, now: hit_share(e)),
    (
        "gpu_utilization",
        "Use of the endpoint's busiest GPU, 0 to 1, as DCGM says.",
        lambda e, now: e.gpu_utilization_known(now),
    ),
    (
        "scrape_age_seconds",
        "Age of the newest good scrape.",
        lambda e, now: None if e.state is None else now - e.state.at,
    ),
    ("scrape_failures", "Failed scrapes in a row.", lambda e, now: e.scrape_failures),
)


def hit_share(endpoint: Endpoint) -> float | None:
    """Share of prompt tokens the engine did not have to compute, since it started; None where it does not
    tell.
    """
    state = endpoint.state
    if state is None:
        return None
    if state.prompt_tokens_total and state.computed_prompt_tokens_total is not None:
        return max(1.0 - state.computed_prompt_tokens_total / state.prompt_tokens_total, 0.0)
    if state.prefix_queries_total and state.prefix_hits_total is not None:
        return min(state.prefix_hits_total / state.prefix_queries_total, 1.0)
    return None


class FleetSeries(Collector):
    """Gauges of every endpoint and pool. May be collected on any thread: it only reads."""

    def __init__(self, endpoints: Mapping[str, Endpoint], clock: Callable[[], float]) -> None:
        self._endpoints = endpoints
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """All gauges at this moment."""
        now = self._clock()
        endpoints = list(self._endpoints.values())
        for name, text, read in _GAUGES:
            family = GaugeMetricFamily(f"extproc_endpoint_{name}", text, labels=_ENDPOINT)
            for endpoint in endpoints:
                value = read(endpoint, now)
                if value is not None:
                    family.add_metric((endpoint.key, endpoint.spec.pool), float(value))
            yield family
        opened = CounterMetricFamily(
            "extproc_circuit_opened", "How often the circuit of an endpoint opened.", labels=_ENDPOINT
        )
        for endpoint in endpoints:
            opened.add_metric((endpoint.key, endpoint.spec.pool), float(endpoint.health.opened))
        yield opened
        missing = GaugeMetricFamily(
            "extproc_metric_missing",
            "1 for a value that the engine's metrics page should have and has not.",
            labels=(*_ENDPOINT, "value"),
        )
        blind: dict[str, bool] = {}
        for endpoint in endpoints:
            pool, state = endpoint.spec.pool, endpoint.state
            blind[pool] = blind.get(pool, True) and endpoint.trust(now) < 1.0
            if state is not None:
                for absent in engine_named(endpoint.spec.engine).missing(state):
                    missing.add_metric((endpoint.key, pool, absent), 1.0)
        yield missing
        all_blind = GaugeMetricFamily(
            "extproc_pool_metrics_stale",
            "1 when no endpoint of the pool has a fresh scrape: decisions rest on our own leases alone.",
            labels=("pool",),
        )
        for pool, stale in blind.items():
            all_blind.add_metric((pool,), float(stale))
        yield all_blind
