"""Queue depth: the shortest queue in the engine, smoothed."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.scheduling.strategy import Candidate, Choice, Query
from extproc.scheduling.ties import ranked


class QueueDepth:
    """The engine's waiting requests, smoothed over five seconds, or our own unstarted leases where they are
    more: these know of the requests since the last scrape. A stale or missing gauge leaves the leases
    alone."""

    terms = ("waiting",)

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Shortest queue first."""
        return ranked(candidates, [depth(candidate, now) for candidate in candidates])


def depth(candidate: Candidate, now: float) -> float:
    """Requests in the endpoint's queue."""
    endpoint = candidate.endpoint
    own = float(endpoint.backlog.unstarted)
    waiting = endpoint.strangers.depth
    return own if waiting is None else max(own, waiting * endpoint.trust(now))
