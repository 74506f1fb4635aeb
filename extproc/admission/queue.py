"""The waiting requests of one pool.

Rules of this file:

- higher priorities go first, but those below the highest that waits are together guaranteed a share of the tokens
  (``min_share``); it goes to the one among them that has had least, so what the middle gets in its turn leaves the
  share to the lowest. A request that has waited for ``aging_s`` counts as one priority higher for every such time,
  never as the highest that any tenant has;
- within a priority tenants share (:mod:`extproc.admission.band`);
- the queue is bounded in requests and bytes: when it is full, the newest request of the longest flow of the lowest
  priority makes place for a higher one;
- what could not start before its deadline is not kept: an arrival whose predicted wait is too long is refused, and
  when the queue turns out longer than it can be emptied in time, the lowest priority is cut first. The prediction is
  the tokens ahead over the learned rate of the band, never less than its guaranteed share of the pool's;
- at its deadline a request leaves, whatever was predicted.
"""

from __future__ import annotations

import heapq
from collections import deque

from extproc.admission.band import Band, Flow
from extproc.admission.drain import DrainRate
from extproc.admission.policy import Policy
from extproc.admission.ticket import Ticket
from extproc.limits.limit import Key

_MOST_OWED = 8
"""Requests' worth of guaranteed share that may add up."""
_FADE = 0.999
"""Of what a priority has had, at every dispatch."""
_MAX_CUT = 256
"""Requests that one step may shed: the rest goes in the next."""


class PoolQueue:
    """See the rules above. Times are monotonic seconds."""

    def __init__(self, policy: Policy, highest: int | None = None) -> None:
        self.policy = policy
        self.highest = highest
        """The highest priority of any tenant; None where there is one only."""
        self.bands: list[Band] = []
        """Highest priority first; only those that were ever used."""
        self.requests = 0
        self.bytes = 0
        self.drain = DrainRate()
        self._by_priority: dict[int, Band] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._parked: dict[Key, deque[tuple[Band, Flow]]] = {}
        self._aside: list[tuple[Band, Flow]] = []
        self._number = 0
        self._owed = 0.0
        """Tokens that lower priorities may take before it is their turn."""
        self._by_share: Ticket | None = None
        """Whom :meth:`next` chose by the guaranteed share."""

    def __len__(self) -> int:
        return self.requests

    @property
    def parked(self) -> bool:
        """Whether any flow waits for a place in a concurrency limit."""
        return bool(self._parked)

    def change(self, policy: Policy, highest: int | None) -> None:
        """A reload: waiting requests keep their deadlines."""
        self.highest = highest
        if policy.order != self.policy.order:
            for band in self.bands:
                band.by_deadline = policy.order == "deadline"
        self.policy = policy

    def push(self, ticket: Ticket, now: float) -> None:
        """Join the queue; ``ticket.deadline`` is set."""
        self._number += 1
        ticket.number = self._number
        ticket.waiting = True
        band = self._band(ticket.tenant.priority)
        if not self.requests:
            self.drain.waiting(now)
        band.push(ticket, now)
        self.requests += 1
        self.bytes += ticket.request.body_size
        heapq.heappush(self._deadlines, (ticket.deadline, ticket.number, ticket))

    def remove(self, ticket: Ticket, now: float) -> None:
        """Leave without being served."""
        if not ticket.waiting:
            return
        ticket.waiting = False
        self._by_priority[ticket.tenant.priority].remove(ticket, now)
        self.requests -= 1
        self.bytes -= ticket.request.body_size
        if not self.requests:
            self.drain.idle(now)
            self._deadlines.clear()
            for flows in self._parked.values():
                for band, flow in flows:
                    band.unpark(flow)
            self._parked.clear()
        elif len(self._deadlines) > 2 * self.requests + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].waiting]
            heapq.heapify(self._deadlines)

    def served(self, ticket: Ticket, now: float) -> None:
        """Its turn came: account for it, and leave."""
        band = self._by_priority[ticket.tenant.priority]
        waiting = [other for other in self.bands if other.order]
        if len(waiting) > 1:
            # What nobody could use is not saved up.
            most = _MOST_OWED * max(other.newest.cost for other in waiting[1:])
            self._owed = min(self._owed + self.policy.min_share * ticket.cost, most)
            if ticket is self._by_share:
                self._owed -= ticket.cost
        else:
            self._owed = 0.0
        for other in self.bands:
            other.had *= _FADE
        band.had += ticket.cost
        band.served(ticket, now)
        self.drain.dispatched(ticket.cost, now)
        self.remove(ticket, now)

    def correct(self, turn: tuple[int, str, float], used: float) -> None:
        """A request that was served by this queue has ended: what it really used counts for its tenant's turn."""
        priority, flow, counted = turn
        band = self._by_priority.get(priority)
        if band is not None and band.order:
            band.correct(flow, used - counted)

    def next(self, now: float, *, above: int | None = None) -> Ticket | None:
        """Whose turn it is. ``above``: only of this priority or a higher one, or by the guaranteed share."""
        heads = [(band, head) for band in self.bands if band.order and (head := band.head()) is not None]
        self._by_share = None
        if len(heads) > 1 and self.policy.min_share > 0.0:
            head = min(heads[1:], key=lambda item: (item[0].had, -item[0].priority))[1]
            # Room that is kept for the highest is touched only when those wait too: else a turn comes soon anyway.
            if self._owed >= head.cost and (above is None or heads[0][0].priority >= above):
                self._by_share = head
                return head
        if above is not None:
            heads = [item for item in heads if item[0].priority >= above]
        if len(heads) < 2:
            return heads[0][1] if heads else None
        return self._aged(heads, now) if self.policy.aging_s else heads[0][1]

    def expired(self, now: float) -> list[Ticket]:
        """Requests whose deadline has passed; the caller removes them."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = heapq.heappop(self._deadlines)[2]
            if ticket.waiting:
                found.append(ticket)
        return found

    @property
    def first_deadline(self) -> float | None:
        """When the next request expires (or has gone before); None for an empty queue."""
        return self._deadlines[0][0] if self._deadlines else None

    def predicted_wait(self, ticket: Ticket, now: float) -> float | None:
        """Seconds until a new request would start; None while nothing is known."""
        priority = ticket.tenant.priority
        above = sum(band.tokens for band in self.bands if band.priority > priority)
        band = self._by_priority.get(priority)
        ahead, rate = 0.0, None
        if band is not None and band.order:
            by_deadline = self.policy.order == "deadline"
            ahead = band.tokens if by_deadline else band.ahead(ticket.flow, ticket.tenant.weight)
            if band.drain.rate(now) is not None:
                # What the band got while it waited: the higher ones have taken theirs already.
                above, rate = 0.0, self._rate(band, now)
        if rate is None:
            rate = self.drain.rate(now)
        if rate is None:
            return None
        return (above + ahead) / rate if rate > 0 else float("inf")

    def is_full(self, ticket: Ticket) -> bool:
        """Whether one more request is one too many."""
        return (
            self.requests >= self.policy.max_requests
            or self.bytes + ticket.request.body_size > self.policy.max_bytes
        )

    def to_make_place(self, ticket: Ticket) -> Ticket | None:
        """Who goes when the queue is full and ``ticket`` comes; None when nobody is lower."""
        for band in reversed(self.bands):
            if band.priority >= ticket.tenant.priority:
                return None
            if band.order:
                return band.to_shed()
        return None

    def hopeless(self, now: float) -> list[Ticket]:
        """Take out requests because the queue cannot be emptied before they must start, lowest priority first."""
        found: list[Ticket] = []
        for band in reversed(self.bands):
            rate = self._rate(band, now) if band.order else None
            if rate is None:
                continue
            while len(band.order) > 1 and len(found) < _MAX_CUT:
                if band.tokens <= rate * max(band.newest.deadline - now, 0.0):
                    break
                ticket = band.to_shed()
                found.append(ticket)
                self.remove(ticket, now)
        return found

    def park(self, ticket: Ticket, key: Key) -> None:
        """Its flow waits for a place in the concurrency limit ``key``."""
        band = self._by_priority[ticket.tenant.priority]
        flow = band.flows[ticket.flow]
        band.park(flow)
        self._parked.setdefault(key, deque()).append((band, flow))

    def unpark(self, key: Key, places: int) -> bool:
        """Places in the limit ``key`` are free: so many of the flows that wait for them take turns again."""
        flows = self._parked.get(key)
        if flows is None:
            return False
        woken = False
        while flows and places > 0:
            band, flow = flows.popleft()
            band.unpark(flow)
            if flow.items:
                places -= 1
                woken = True
        if not flows:
            del self._parked[key]
        return woken

    def parked_keys(self) -> list[Key]:
        """The concurrency limits that flows wait for."""
        return list(self._parked)

    def set_aside(self, ticket: Ticket) -> None:
        """Its flow takes no turn until :meth:`put_back`: no endpoint with room can serve its head."""
        band = self._by_priority[ticket.tenant.priority]
        flow = band.flows[ticket.flow]
        band.park(flow)
        self._aside.append((band, flow))

    def put_back(self) -> None:
        """Flows that were set aside take turns again."""
        for band, flow in self._aside:
            band.unpark(flow)
        self._aside.clear()

    @property
    def aside(self) -> int:
        """Flows set aside."""
        return len(self._aside)

    def _band(self, priority: int) -> Band:
        band = self._by_priority.get(priority)
        if band is None:
            band = Band(priority, by_deadline=self.policy.order == "deadline")
            self._by_priority[priority] = band
            self.bands.append(band)
            self.bands.sort(key=lambda item: -item.priority)
        return band

    def _rate(self, band: Band, now: float) -> float | None:
        """Tokens per second that the band can count on."""
        pool, own = self.drain.rate(now), band.drain.rate(now)
        if pool is None:
            return own
        waiting = [other for other in self.bands if other.order]
        if own is None:
            return pool if not waiting or waiting[0] is band else None
        if waiting and waiting[0] is not band:
            own = max(own, self.policy.min_share * pool / (len(waiting) - 1))
        return own

    def _aged(self, heads: list[tuple[Band, Ticket]], now: float) -> Ticket:
        """The head of the highest band, or the oldest request of one that has aged as high; of equals the older."""
        floor = 1 if self.highest is None or heads[0][0].priority >= self.highest else 0
        best, chosen = (0, float("-inf") if floor else heads[0][1].arrived_at), heads[0][1]
        for place, (band, _) in enumerate(heads[1:], 1):
            oldest = band.oldest
            if oldest is None:
                continue
            rank = max(place - int((now - oldest.arrived_at) / self.policy.aging_s), floor)
            if rank < place and (rank, oldest.arrived_at) < best:
                best, chosen = (rank, oldest.arrived_at), oldest
        return chosen
