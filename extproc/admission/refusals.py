"""Refusals of the queue, with the time after which another try is worth it."""

from __future__ import annotations

from extproc.routing.rejection import Rejection

_MOST_S = 60.0


def overloaded(pool: str, late_s: float) -> Rejection:
    """429: the request could not start before its deadline."""
    message = f"Pool `{pool}` is overloaded: the request could not start in time."
    return _busy(message, "shed", late_s)


def queue_full(pool: str, late_s: float) -> Rejection:
    """429: no place in the queue."""
    return _busy(f"Pool `{pool}` is overloaded: its queue is full.", "queue_full", late_s)


def queue_timeout(pool: str, waited_s: float) -> Rejection:
    """503: the deadline passed in the queue."""
    message = f"The request waited {waited_s:.0f} s for pool `{pool}` and no engine became free."
    return Rejection(503, "server_error", "queue_timeout", message, "queue_timeout", retry_after_s=1.0)


def circuit_open(pool: str, seconds: float) -> Rejection:
    """503: the pool's engines failed together a moment ago."""
    message = f"The engines of pool `{pool}` are failing; requests are refused for a moment."
    return Rejection(
        503, "server_error", "no_capacity", message, "circuit_open", retry_after_s=max(seconds, 1.0)
    )


def _busy(message: str, reason: str, late_s: float) -> Rejection:
    retry_s = min(max(late_s, 1.0), _MOST_S)
    return Rejection(429, "rate_limit_error", "overloaded", message, reason, retry_after_s=retry_s)
