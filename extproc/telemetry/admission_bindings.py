"""Numbers of limits and queues, shown as metrics. Tenants and pools are those of the configuration."""

from __future__ import annotations

from collections.abc import Callable

from extproc.admission.admission import Admission
from extproc.telemetry.metrics import Metrics

_MOST_FLOWS = 200
"""Tenants (or client addresses) whose waiting requests have a series of their own; the rest is `other`."""


def bind_admission(metrics: Metrics, admission: Admission, clock: Callable[[], float]) -> None:
    """Show what admission counts."""
    counts, limiter = admission.counts, admission.limiter

    def flows() -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for pool, queue in list(admission.queues.items()):
            for band in list(queue.bands):
                for flow in list(band.flows.values()):
                    if flow.items:
                        # Client addresses are not tenants: they are counted under whom they belong to.
                        tenant = flow.name.partition("/")[0]
                        key = (
                            pool,
                            tenant if len(found) < _MOST_FLOWS or (pool, tenant) in found else "other",
                        )
                        found[key] = found.get(key, 0.0) + len(flow.items)
        return found

    metrics.bind(
        "queue_requests",
        lambda: {
            (pool, str(band.priority)): float(len(band.order))
            for pool, queue in list(admission.queues.items())
            for band in list(queue.bands)
        },
    )
    metrics.bind("queue_tenant_requests", flows)
    metrics.bind(
        "queue_bytes", lambda: {(pool,): float(q.bytes) for pool, q in list(admission.queues.items())}
    )
    metrics.bind("queued", lambda: counts.waited)
    metrics.bind(
        "queue_left",
        lambda: {
            ("client",): float(counts.cancelled),
            ("timeout",): float(counts.timeouts),
            ("shed",): float(counts.shed),
        },
    )
    metrics.bind(
        "queue_dispatched", lambda: {(pool,): float(count) for pool, (count, _) in list(counts.waits.items())}
    )
    metrics.bind(
        "queue_wait_seconds", lambda: {(pool,): total for pool, (_, total) in list(counts.waits.items())}
    )
    metrics.bind("fallbacks", lambda: {key: float(count) for key, count in list(counts.fallbacks.items())})
    metrics.bind(
        "circuit_open",
        lambda: {(pool,): float(c.is_open(clock())) for pool, c in list(admission.circuits.items())},
    )
    metrics.bind(
        "limit_refusals", lambda: {key: float(count) for key, count in list(limiter.counts.refused.items())}
    )
    metrics.bind(
        "tenant_refused", lambda: {key: float(count) for key, count in list(counts.refusals.items())}
    )
    metrics.bind(
        "tenant_tokens", lambda: {(tenant,): tokens for tenant, tokens in list(counts.tokens.items())}
    )
