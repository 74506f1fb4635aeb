"""Every endpoint as plain values: what ``GET /fleet`` answers and ``extproc fleet`` shows."""

from __future__ import annotations

from collections.abc import Iterable

from extproc.fleet.endpoint import Endpoint
from extproc.telemetry.fleet_series import hit_share


def fleet_report(endpoints: Iterable[Endpoint], now: float) -> list[dict[str, object]]:
    """One object an endpoint, in the order of the fleet. None is 'not known'; times in seconds."""
    return [_report(endpoint, now) for endpoint in endpoints]


def _report(endpoint: Endpoint, now: float) -> dict[str, object]:
    spec, state, health, stats = endpoint.spec, endpoint.state, endpoint.health, endpoint.stats
    rate = endpoint.rates.prefill
    backlog = endpoint.backlog.tokens(now, rate)
    return {
        "endpoint": endpoint.key,
        "pool": spec.pool,
        "models": list(spec.models),
        "version": spec.version,
        "engine": spec.engine,
        "role": spec.role.value,
        "lifecycle": endpoint.lifecycle.value,
        "excluded": health.excluded(now),
        "excluded_for_s": max(health.excluded_until - now, 0.0),
        "circuit": health.state(now).value,
        "circuit_why": health.why.value,
        "busy_for_s": max(health.busy_until - now, 0.0),
        "failures": health.failures,
        "error_share": health.error_share(now),
        "leases": endpoint.leases,
        "ended_1m": stats.minute.ended(now),
        "unstarted": endpoint.backlog.unstarted,
        "backlog_tokens": backlog,
        "backlog_s": backlog / max(rate, 1e-9),
        "backlog_estimated": endpoint.backlog.estimated,
        "prefill_tokens_per_s": rate,
        "running": state.running if state else None,
        "waiting": state.waiting if state else None,
        "kv_usage": state.kv_usage if state else None,
        "kv_tokens": endpoint.kv_tokens,
        "sleeping": state.sleeping if state else None,
        "adapters": sorted(state.running_adapters) if state and state.running_adapters is not None else None,
        "hit_share": hit_share(endpoint),
        "gpu_utilization": endpoint.gpu_utilization_known(now),
        "gpu_utilization_age_s": (
            now - endpoint.gpu_utilization_at if endpoint.gpu_utilization is not None else None
        ),
        "scrape_age_s": now - state.at if state else None,
        "scrape_failures": endpoint.scrape_failures,
        "ttft_1m_s": stats.minute.ttft_s(now),
        "ttft_5m_s": stats.five_minutes.ttft_s(now),
        "p99_5m_s": stats.five_minutes.duration_s(0.99, now),
        "success_5m": stats.five_minutes.success(now),
        "tokens_per_s_1m": stats.minute.tokens_per_s(now),
    }
