"""What is known of the engines' caches by their events, as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from extproc.fleet.endpoint import Endpoint
from extproc.kvcache.rank import State
from extproc.kvcache.view import CacheView
from extproc.telemetry.metrics import Metrics


class Subscriber(Protocol):
    """What reads the events."""

    @property
    def behind_s(self) -> float:
        """How long there has been unread work without a pause."""
        ...


def bind_kv_events(
    metrics: Metrics, view: CacheView, subscriber: Subscriber, endpoints: Mapping[str, Endpoint]
) -> None:
    """Show counts, states and alarms of KV events."""
    ranks, index = view.ranks, view.precise
    told, taken = ranks.counts, index.counts

    def states() -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {(state.value,): 0.0 for state in State}
        for _, _, rank in list(ranks):
            found[rank.state.value,] += 1
        return found

    metrics.bind("kv_events_ranks", states)
    metrics.bind(
        "kv_events_exact",
        lambda: {
            (key,): float(ranks.exact(endpoint.slot))
            for key, endpoint in dict(endpoints).items()
            if endpoint.spec.kv_events_port is not None
        },
    )
    metrics.bind("kv_events_messages", lambda: told.messages)
    metrics.bind("kv_events_blocks", lambda: {("stored",): taken.stored, ("removed",): taken.removed})
    metrics.bind(
        "kv_events_odd",
        lambda: {
            ("unreadable",): told.unreadable,
            ("undecodable",): taken.undecodable,
            ("unknown",): taken.unknown,
            ("orphan",): taken.orphans,
            ("skipped",): taken.skipped,
            ("no_room",): taken.left_out,
        },
    )
    metrics.bind("kv_events_gaps", lambda: told.gaps)
    metrics.bind("kv_events_restarts", lambda: told.restarts)
    metrics.bind(
        "kv_events_replays",
        lambda: {("asked",): told.replays, ("failed",): told.replays_failed},
    )
    metrics.bind("kv_events_behind_seconds", lambda: subscriber.behind_s)
