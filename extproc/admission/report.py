"""Who waits where, as plain values for the admin page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from extproc.admission.admission import Admission
from extproc.admission.band import Band
from extproc.admission.queue import PoolQueue

MAX_TENANTS = 50
"""Most tenants listed of a band; the rest is in its totals."""


def queue_report(admission: Admission, pools: Sequence[str], now: float) -> dict[str, Any]:
    """All pools in order, each with its priorities and their tenants. Times in seconds; None is not known."""
    return {
        "waiting": admission.waiting,
        "pools": [_pool(admission, name, admission.queues.get(name), now) for name in pools],
    }


def _pool(admission: Admission, name: str, queue: PoolQueue | None, now: float) -> dict[str, Any]:
    circuit = admission.circuits.get(name)
    first = queue.first_deadline if queue is not None and queue.requests else None
    return {
        "pool": name,
        "requests": queue.requests if queue is not None else 0,
        "bytes": queue.bytes if queue is not None else 0,
        "tokens_per_s": queue.drain.rate(now) if queue is not None else None,
        "next_deadline_s": None if first is None else max(first - now, 0.0),
        "circuit": "open" if circuit is not None and circuit.is_open(now) else "closed",
        "max_wait_s": admission.policy(name).max_wait_s,
        "fallback": admission.policy(name).fallback,
        "priorities": [_band(band, now) for band in queue.bands if band.order] if queue is not None else [],
    }


def _band(band: Band, now: float) -> dict[str, Any]:
    flows = [flow for flow in band.flows.values() if flow.items]
    flows.sort(key=lambda flow: -len(flow.items))
    oldest = next(iter(band.order.values()))
    return {
        "priority": band.priority,
        "requests": len(band.order),
        "tokens": band.tokens,
        "tokens_per_s": band.drain.rate(now),
        "oldest_s": now - oldest.arrived_at,
        "tenants": [
            {
                "tenant": flow.name,
                "requests": len(flow.items),
                "weight": flow.weight,
                "oldest_s": now - flow.head.arrived_at,
                "limited": flow.parked,
            }
            for flow in flows[:MAX_TENANTS]
        ],
    }
