"""The waiting requests of one priority: whose turn it is among tenants.

Rules of this file (start-time fair queueing: Goyal, Vin, Cheng, "Start-time Fair Queueing", SIGCOMM 1996):

- a flow's start is the later of the band's virtual time when it began to wait and its last finish; when its oldest
  request is served, its finish is its start plus the request's tokens over the flow's weight. The lowest start is
  served, which sets the virtual time: over any stretch, flows that wait get tokens by their weights, and a flow that
  was away gains nothing. Only what is served counts, and when usage is known it counts as what it was: requests that
  expire or are shed cost their flow no turn;
- within a flow the order is that of arrival;
- a flow may be parked: it waits for something of its own (a place in a concurrency limit) and takes no turn;
- every step is O(log n): heaps hold old entries, which are recognised and dropped when they come up.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from extproc.admission.drain import DrainRate
from extproc.admission.ticket import Ticket

_SPARE_FLOWS = 1000
_LEAST_WEIGHT = 1e-6


class Flow:
    """The waiting requests of one tenant (or one client address)."""

    __slots__ = ("finish", "items", "name", "parked", "start", "tokens", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.items: OrderedDict[int, Ticket] = OrderedDict()
        self.tokens = 0.0
        self.start = 0.0
        self.finish = 0.0
        self.parked = False

    @property
    def head(self) -> Ticket:
        """The oldest request."""
        return next(iter(self.items.values()))


class Band:
    """One priority. ``by_deadline``: the nearest deadline among the flows' heads goes first."""

    def __init__(self, priority: int, *, by_deadline: bool = False) -> None:
        self.priority = priority
        self.by_deadline = by_deadline
        self.flows: dict[str, Flow] = {}
        self.order: OrderedDict[int, Ticket] = OrderedDict()
        """All requests by arrival."""
        self.tokens = 0.0
        self.weight = 0.0
        """Sum of the weights of flows that wait."""
        self.had = 0.0
        """Tokens served lately."""
        self.drain = DrainRate()
        self._time = 0.0
        self._heap: list[tuple[float, int, Flow]] = []
        self._longest: list[tuple[int, int, Flow]] = []

    def __len__(self) -> int:
        return len(self.order)

    def push(self, ticket: Ticket, now: float) -> None:
        """Join the queue."""
        flow = self.flows.get(ticket.flow)
        if flow is None:
            if len(self.flows) > 2 * len(self.order) + _SPARE_FLOWS:
                self._prune()
            flow = self.flows[ticket.flow] = Flow(ticket.flow)
        if not self.order:
            self.drain.waiting(now)
        if not flow.items:
            flow.weight = max(ticket.tenant.weight, _LEAST_WEIGHT)
            flow.start = max(self._time, flow.finish)
        first = not flow.items
        flow.items[ticket.number] = ticket
        self.order[ticket.number] = ticket
        self.tokens += ticket.cost
        flow.tokens += ticket.cost
        heapq.heappush(self._longest, (-len(flow.items), ticket.number, flow))
        if first:
            self.weight += flow.weight
            if not flow.parked:
                self._enter(flow)

    def remove(self, ticket: Ticket, now: float) -> None:
        """Leave the queue, served or not."""
        flow = self.flows[ticket.flow]
        was_head = flow.head is ticket
        del flow.items[ticket.number]
        del self.order[ticket.number]
        self.tokens = self.tokens - ticket.cost if self.order else 0.0
        flow.tokens = flow.tokens - ticket.cost if flow.items else 0.0
        if not flow.items:
            self.weight = self.weight - flow.weight if self.order else 0.0
        elif was_head and not flow.parked:
            self._enter(flow)
        if not self.order:
            self.drain.idle(now)
            self._heap.clear()
            self._longest.clear()

    def served(self, ticket: Ticket, now: float) -> None:
        """Its turn came: the virtual time moves on. To be called before :meth:`remove`."""
        flow = self.flows[ticket.flow]
        self._time = max(self._time, flow.start)
        flow.start = flow.finish = flow.start + ticket.cost / flow.weight
        self.drain.dispatched(ticket.cost, now)

    def correct(self, flow_name: str, tokens: float) -> None:
        """A request of the flow turned out to use so many tokens more (or, below zero, fewer) than was counted."""
        flow = self.flows.get(flow_name)
        if flow is None:
            return
        # Never before the band's time: who used less than was thought gains no more than a first place.
        flow.finish = max(flow.finish + tokens / flow.weight, self._time)
        if flow.items:
            flow.start = flow.finish
            if not flow.parked:
                self._enter(flow)

    def head(self) -> Ticket | None:
        """Whose turn it is; None when every flow is parked."""
        heap = self._heap
        while heap:
            start, number, flow = heap[0]
            if flow.parked or number not in flow.items or flow.head.number != number:
                heapq.heappop(heap)
            elif not self.by_deadline and start != flow.start:
                heapq.heapreplace(heap, (flow.start, number, flow))
            else:
                return flow.items[number]
        return None

    @property
    def oldest(self) -> Ticket | None:
        """The request that waits longest, unless its flow is parked."""
        if not self.order:
            return None
        ticket = next(iter(self.order.values()))
        return None if self.flows[ticket.flow].parked else ticket

    @property
    def newest(self) -> Ticket:
        """The request that came last."""
        return next(reversed(self.order.values()))

    def to_shed(self) -> Ticket:
        """The newest request of the flow with the most requests: who fills the queue gives way first."""
        heap = self._longest
        while True:
            count, number, flow = heap[0]
            if len(flow.items) == -count:
                return next(reversed(flow.items.values()))
            if flow.items:
                heapq.heapreplace(heap, (-len(flow.items), number, flow))
            else:
                heapq.heappop(heap)

    def ahead(self, flow_name: str, weight: float) -> float:
        """Tokens of this band that would be served before a new request of this flow, estimated."""
        flow = self.flows.get(flow_name)
        if flow is None:
            return 0.0
        late = max(flow.finish - self._time, 0.0) + flow.tokens / weight
        others = self.weight if flow.items else self.weight + weight
        return min(late * others, self.tokens)

    def park(self, flow: Flow) -> None:
        """Take no turn until :meth:`unpark`."""
        flow.parked = True

    def unpark(self, flow: Flow) -> None:
        """Take turns again."""
        if flow.parked:
            flow.parked = False
            if flow.items:
                self._enter(flow)

    def _enter(self, flow: Flow) -> None:
        head = flow.head
        heapq.heappush(self._heap, (head.deadline if self.by_deadline else flow.start, head.number, flow))

    def _prune(self) -> None:
        """Forget flows that owe nothing."""
        self.flows = {
            name: flow
            for name, flow in self.flows.items()
            if flow.items or (self.order and flow.finish > self._time)
        }
