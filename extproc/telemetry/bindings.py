"""Which running totals of which part are shown as which mirrored metric."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Protocol

from extproc.ledger import Ledger
from extproc.release.releases import Releases
from extproc.release.shadow import Shadows
from extproc.telemetry.metrics import Metrics


class StreamTotals(Protocol):
    """What the ext_proc servicer counts."""

    in_flight: int
    buffered_bytes: int
    total: int
    messages: int
    cancelled: int
    failed: int
    brief: int


class LogTotals(Protocol):
    """What the access log servicer counts."""

    streams: int
    broken: int
    records: int
    unreadable: int


def bind_streams(metrics: Metrics, totals: StreamTotals) -> None:
    """Show what the ext_proc servicer counts."""
    metrics.bind("streams_in_flight", lambda: totals.in_flight)
    metrics.bind("buffered_bytes", lambda: totals.buffered_bytes)
    metrics.bind("streams", lambda: totals.total)
    metrics.bind("messages", lambda: totals.messages)
    metrics.bind("streams_cancelled", lambda: totals.cancelled)
    metrics.bind("streams_failed", lambda: totals.failed)
    metrics.bind("requests_brief", lambda: totals.brief)


class GuardTotals(Protocol):
    """What the stream guard counts."""

    streams: int
    total: int
    chunks: int
    events: dict[str, int]


def bind_guard(metrics: Metrics, totals: GuardTotals) -> None:
    """Show what the stream guard counts."""
    metrics.bind("guard_streams_open", lambda: totals.streams)
    metrics.bind("guard_streams", lambda: totals.total)
    metrics.bind("guard_chunks", lambda: totals.chunks)
    metrics.bind("guard_events", lambda: {(word,): n for word, n in dict(totals.events).items()})


def bind_releases(
    metrics: Metrics, releases: Releases, shadows: Shadows, events: Mapping[tuple[str, str, str], int]
) -> None:
    """Show releases and shadow traffic."""

    def shadow_requests() -> dict[tuple[str, ...], float]:
        rows: dict[tuple[str, ...], float] = {}
        for pool, counts in shadows.totals().items():
            rows |= {(pool, word): float(count) for word, count in counts.items()}
        return rows

    metrics.bind(
        "release_share",
        lambda: {
            (pool, rollout.plan.candidate, rollout.state.value): rollout.share
            for pool, rollout in dict(releases.rollouts).items()
        },
    )
    metrics.bind("release_events", lambda: {tuple(key): float(count) for key, count in events.items()})
    metrics.bind("shadow_requests", shadow_requests)


def bind_feedback(metrics: Metrics, ledger: Ledger, log: LogTotals, endpoints: Container[str]) -> None:
    """Show what the ledger and the access log servicer count; failed attempts only of endpoints that still
    exist.
    """
    counts = ledger.counts
    metrics.bind("leases", lambda: len(ledger.leases))
    metrics.bind("leases_ended", lambda: {("dropped",): counts.dropped, ("dead",): counts.dead})
    metrics.bind("leases_moved", lambda: counts.moved)
    metrics.bind("leases_adopted", lambda: counts.adopted)
    retries = ledger.retries
    metrics.bind(
        "retries_busy", lambda: {(pool,): count for pool, count in dict(retries.spent_total).items()}
    )
    metrics.bind(
        "retries_withheld", lambda: {(pool,): count for pool, count in dict(retries.withheld_total).items()}
    )
    metrics.bind("records", lambda: log.records)
    metrics.bind(
        "records_odd",
        lambda: {("unknown",): counts.unknown, ("late",): counts.late, ("unreadable",): log.unreadable},
    )
    metrics.bind("log_streams", lambda: log.streams)
    metrics.bind("log_streams_broken", lambda: log.broken)
    metrics.bind(
        "attempts_failed",
        lambda: {key: count for key, count in dict(counts.failed_attempts).items() if key[0] in endpoints},
    )


def bind_traces(metrics: Metrics, counts: Mapping[str, int]) -> None:
    """Show what became of spans."""
    metrics.bind("trace_spans", lambda: {(result,): float(count) for result, count in counts.items()})
