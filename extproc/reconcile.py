"""Leases whose ending was never heard, closed by what the engines say.

When Envoy's log breaks, the endings of that time may be lost. Their leases would stand until they are dead (three missed
renewals), fill queues and bend decisions for minutes. Rules of this file:

- suspect are leases without a sign of life since the log was last known to be broken; in ordinary times there are none;
- an engine whose fresh scrape says that it runs and holds fewer requests than it has leases has ended the difference: so
  many of its suspects are closed, the oldest first, and nothing is learnt from them;
- only leases opened ``SETTLE_S`` before that scrape began count, and only scrapes ``SETTLE_S`` after the break: records
  that Envoy kept may still come;
- an engine that does not say what it runs keeps its leases until they are dead.
"""

from __future__ import annotations

from extproc.fleet.endpoint import Endpoint
from extproc.ledger import Lease, Ledger

SETTLE_S = 2.0


class Reconciler:
    """``now`` is monotonic seconds, of the same clock as the scrapes."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._deaf_at = float("-inf")
        self._was_deaf = False
        self._done = True

    def listened(self, now: float, *, deaf: bool) -> None:
        """``deaf``: the log is broken, or was since the last call. Call it before each :meth:`work`."""
        if deaf or self._was_deaf:  # the break ended at some time since the last call
            self._deaf_at = now
            self._done = False
        self._was_deaf = deaf

    def work(self, now: float) -> int:
        """Close what must have ended; returns how many. Call it once a second or so."""
        if self._done or now < self._deaf_at + SETTLE_S:
            return 0
        everywhere: dict[Endpoint, list[Lease]] = {}
        for lease in self._ledger.leases.values():
            everywhere.setdefault(lease.endpoint, []).append(lease)
        closed, left = 0, 0
        for endpoint, leases in everywhere.items():
            suspects = [lease for lease in leases if lease.renewed_at <= self._deaf_at]
            ended = suspects[: self._surplus(endpoint, leases, now)]
            for lease in ended:
                self._ledger.give_up(lease, now, "unheard")
            closed += len(ended)
            left += len(suspects) - len(ended)
        self._done = not left
        return closed

    def _surplus(self, endpoint: Endpoint, leases: list[Lease], now: float) -> int:
        state = endpoint.state
        if (
            state is None
            or state.running is None
            or state.waiting is None
            or now > endpoint.fresh_until
            or state.at < self._deaf_at + SETTLE_S
        ):
            return 0
        known = sum(lease.opened_at < state.at - SETTLE_S for lease in leases)
        return max(known - int(state.running + state.waiting), 0)
