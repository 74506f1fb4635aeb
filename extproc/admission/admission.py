"""When a request is sent: limits, circuit, queue, fallback. Where it is sent is the dispatcher's.

Rules of this file:

- a request is matched, its limits are reserved, and if nobody of its pool waits and an endpoint has room it is
  dispatched in the same call: the usual case, with nothing allocated but the ticket;
- else it waits (:mod:`extproc.admission.queue`), is shed when it could not start in time, or goes to the pool's
  fallback; all of that before dispatch, never after: what was sent once is sent again with the same bytes;
- ``poll`` picks the next request and opens its lease in the turn that frees capacity: a lease that closes polls, so do
  a scrape and a timer (:meth:`Admission.next_wakeup`);
- a reservation ends exactly once: with the lease (:meth:`Admission.settled`, called once by the ledger), or here when
  the request is refused or leaves the queue;
- places in concurrency limits are taken at dispatch and given back with the lease; whoever lacks one waits in the
  queue, and his flow is parked until a place is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from extproc.admission import refusals
from extproc.admission.circuit import Circuit
from extproc.admission.counts import AdmissionCounts
from extproc.admission.decision import Decision
from extproc.admission.dispatcher import Dispatcher
from extproc.admission.policy import Policy
from extproc.admission.queue import PoolQueue
from extproc.admission.room import Room
from extproc.admission.rules import AdmissionRules, Demand
from extproc.admission.spending import spent
from extproc.admission.ticket import Ticket
from extproc.api.request import InferenceRequest
from extproc.fleet.endpoint import Endpoint, Lifecycle, Role
from extproc.fleet.fleet import Fleet
from extproc.fleet.model_stats import ModelStats
from extproc.ledger import Lease, Settlement
from extproc.limits.headers import rate_headers
from extproc.limits.headers import refused as limit_refusal
from extproc.limits.limiter import Limiter, Refusal, Reserved
from extproc.limits.tally import ReplySizes
from extproc.outcome import Outcome
from extproc.routing.identity import model_not_allowed, model_unreadable
from extproc.routing.match import Match
from extproc.routing.rejection import Rejection
from extproc.routing.tenant import ANONYMOUS, Tenant

_SHED_EVERY_S = 0.25
_WAKE_S = 0.1
_MOST_ASIDE = 16


class Admission:
    """Sans-IO: ``now`` is monotonic seconds."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher, models: ModelStats) -> None:
        self.limiter = Limiter()
        self.sizes = ReplySizes()
        self.counts = AdmissionCounts()
        self.queues: dict[str, PoolQueue] = {}
        self.circuits: dict[str, Circuit] = {}
        self.on_trial: Callable[[Lease], bool] = lambda lease: False
        """Whether a request went to the candidate of a release: its failures are the release's to judge, and must not close
        the pool to everybody else."""
        self.on_stage: Callable[[str, str], None] | None = None
        """Hears a request's id and the stage it is through with: match, limit. For traces; None: nobody listens."""
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._models = models
        self._rules = AdmissionRules()
        self._default = Policy()
        self._shed_at = 0.0
        self._polling = False
        dispatcher.queued = self._queued

    def install(self, rules: AdmissionRules, now: float) -> None:
        """Take over a configuration. Waiting requests stay, and keep their deadlines."""
        self._rules = rules
        self.limiter.install(rules.limits, now)
        for name, queue in self.queues.items():
            queue.change(self.policy(name), rules.highest)

    def policy(self, pool: str) -> Policy:
        """The rules of waiting of a pool."""
        return self._rules.policies.get(pool, self._default)

    @property
    def waiting(self) -> int:
        """Requests in all queues."""
        return sum(queue.requests for queue in self.queues.values())

    def submit(
        self,
        request: InferenceRequest,
        now: float,
        tenant: Tenant = ANONYMOUS,
        notify: Callable[[], None] = lambda: None,
        *,
        client: str = "",
        reserved: Reserved | None = None,
    ) -> Ticket:
        """Decide, or let the request wait: then ``answer`` is None and ``notify`` is called once when it is set.

        ``client`` is the client's address, for limits; ``reserved`` is what a shared store granted (:meth:`demand`).
        """
        ticket = Ticket(request, tenant, now, notify, reserved=reserved)
        match = self._matched(request, tenant)
        if isinstance(match, Rejection):
            return self._refuse(ticket, match, now)
        ticket.match = match
        if self.on_stage is not None:
            self.on_stage(request.id, "match")
        ticket.cost = float(max(self._tokens(request, match), 1))
        ticket.meters = self.limiter.meters(
            tenant, limited_model(request, match), match.route.name, client, now
        )
        if ticket.meters and reserved is None:
            granted = self.limiter.reserve(ticket.meters, self._reserves(request, match, ticket), now)
            if isinstance(granted, Refusal):
                headers = rate_headers(ticket.meters, now)
                return self._refuse(ticket, limit_refusal(granted, headers), now)
            ticket.reserved = granted
        if self.on_stage is not None:
            self.on_stage(request.id, "limit")
        pool = match.pool.name
        circuit = self.circuits.get(pool)
        if circuit is not None and (closed_s := circuit.admits(now)) > 0.0:
            if self._fall_back(ticket, "circuit", now):
                return ticket
            return self._refuse(ticket, refusals.circuit_open(pool, closed_s), now)
        queue = self.queues.get(pool)
        if (queue is None or not queue.requests) and (
            not ticket.meters or self.limiter.blocked(ticket.meters) is None
        ):
            answer = self._dispatcher.place(ticket, match, now, self._room(pool, tenant, now).has)
            if isinstance(answer, Rejection):
                if self._fall_back(ticket, "unavailable", now):
                    return ticket
                return self._refuse(ticket, answer, now)
            if answer is not None:
                self._sent(ticket, answer, now)
                return ticket
        self._wait(ticket, match, now)
        return ticket

    def demand(self, request: InferenceRequest, tenant: Tenant, client: str = "") -> Demand | Rejection:
        """What a shared store must grant before :meth:`submit`; without scopes there is nothing to ask."""
        match = self._matched(request, tenant)
        if isinstance(match, Rejection):
            return match
        scopes = self.limiter.scopes(tenant, limited_model(request, match), match.route.name, client)
        tokens = self._reserves(
            request, match, Ticket(request, tenant, 0.0, cost=float(self._tokens(request, match)))
        )
        return Demand(scopes, tokens)

    def cancel(self, ticket: Ticket, now: float) -> None:
        """The client left: out of the queue at once. Nothing happens to a ticket that is answered."""
        if ticket.answer is None and ticket.waiting and ticket.match is not None:
            self.queues[ticket.match.pool.name].remove(ticket, now)
            self.counts.cancelled += 1
            self._give_back(ticket, now)

    def poll(self, now: float) -> None:
        """Dispatch what can be; expire and shed what cannot."""
        if self._polling:
            return
        self._polling = True
        try:
            shed = now >= self._shed_at
            if shed:
                self._shed_at = now + _SHED_EVERY_S
            for pool, queue in self.queues.items():
                if queue.requests:
                    self._poll(pool, queue, now, shed=shed)
        finally:
            self._polling = False

    def next_wakeup(self, now: float) -> float | None:
        """When :meth:`poll` should be called at the latest; None while nothing waits."""
        firsts = [queue.first_deadline for queue in self.queues.values() if queue.requests]
        if not firsts:
            return None
        return min(now + _WAKE_S, *(first for first in firsts if first is not None))

    def settled(self, settlement: Settlement, now: float) -> None:
        """A lease closed: end its reservation, give back its places, let the next one go."""
        lease = settlement.lease
        for meter in lease.meters:
            meter.running -= 1
        used = spent(settlement, self.sizes)
        if lease.reserved is not None:
            if used is None and settlement.reason == "dead":
                used = lease.reserved.tokens  # nobody told us: it may well have run
            if used is None:
                lease.reserved.refund(now)
            else:
                lease.reserved.settle(used, now)
                self.counts.used(lease.tenant, used)
        if lease.turn is not None and (queue := self.queues.get(lease.pool)) is not None:
            queue.correct(lease.turn, used or 0.0)
        self._tell_circuit(settlement, now)
        self.poll(now)

    # -- inside ------------------------------------------------------------------------------------

    def _queued(self, pool: str) -> int:
        queue = self.queues.get(pool)
        return queue.requests if queue is not None else 0

    def _matched(self, request: InferenceRequest, tenant: Tenant) -> Match | Rejection:
        match = self._dispatcher.match(request, tenant)
        if isinstance(match, Match) and tenant.models is not None:
            if request.unread:
                return model_unreadable()
            if not _allowed(request, match, tenant):
                return model_not_allowed(limited_model(request, match))
        return match

    def _tokens(self, request: InferenceRequest, match: Match) -> int:
        """Expected tokens of prompt and answer."""
        model = match.splice or request.model or ""
        ids = request.prompt.token_ids
        prompt = self._models.prompt_tokens(model, request.prompt.size, len(ids) if ids is not None else None)
        return prompt + (
            self._models.output_tokens(model, request.max_tokens) if request.api.generates else 0
        )

    def _reserves(self, request: InferenceRequest, match: Match, ticket: Ticket) -> float:
        """What is reserved: the client's own bound on the answer where there is one, else the expectation."""
        if request.max_tokens is None or not request.api.generates:
            return ticket.cost
        model = match.splice or request.model or ""
        expected = self._models.output_tokens(model, request.max_tokens)
        return max(ticket.cost - expected, 0.0) + request.max_tokens

    def _room(self, pool: str, tenant: Tenant, now: float) -> Room:
        highest = self._rules.highest
        return Room(self.policy(pool), now, highest=highest is None or tenant.priority >= highest)

    def _wait(self, ticket: Ticket, match: Match, now: float) -> None:
        """Nothing has room for it now, or others were there before."""
        pool, tenant = match.pool.name, ticket.tenant
        policy = self.policy(pool)
        queue = self.queues.get(pool)
        if queue is None:
            queue = self.queues[pool] = PoolQueue(policy, self._rules.highest)
        ticket.flow = tenant.name
        if self.limiter.rules.client.concurrency is not None and ticket.meters:
            kind, name = ticket.meters[-1].key
            ticket.flow += f"/{name}" if kind == "client" else ""
        max_wait_s = policy.max_wait_s if tenant.max_wait_s is None else tenant.max_wait_s
        blocked = self.limiter.blocked(ticket.meters) is not None
        predicted = None if blocked else queue.predicted_wait(ticket, now)
        late = predicted if predicted is not None else 0.0
        soon = blocked or late < policy.fallback_after_s
        if not soon and self._fall_back(ticket, "saturated", now):
            return
        if max_wait_s <= 0.0 or late > max_wait_s:
            # At the head of the queue one waits for a place, not for tokens.
            self._refuse(ticket, refusals.overloaded(pool, late - max_wait_s), now)
            return
        while queue.is_full(ticket):
            victim = queue.to_make_place(ticket)
            if victim is None:
                self._refuse(ticket, refusals.queue_full(pool, late), now)
                return
            self._shed(queue, victim, now)
        ticket.deadline = now + max_wait_s
        queue.push(ticket, now)
        self.counts.waited += 1
        if not self._polling:
            self._polling = True
            try:
                self._poll(pool, queue, now, shed=False)
            finally:
                self._polling = False

    def _poll(self, pool: str, queue: PoolQueue, now: float, *, shed: bool) -> None:
        for ticket in queue.expired(now):
            queue.remove(ticket, now)
            if not self._fall_back(ticket, "queue_timeout", now):
                self.counts.timeouts += 1
                self._refuse(ticket, refusals.queue_timeout(pool, now - ticket.arrived_at), now)
            else:
                ticket.notify()
        self._unpark(queue)
        policy, highest = self.policy(pool), self._rules.highest
        any_one = Room(policy, now, highest=highest is None)
        the_highest = Room(policy, now, highest=True)
        endpoints = _serving(self._fleet.pool(pool), now)
        while queue.requests:
            above = None
            # Without any endpoint there is no room to wait for: the dispatcher says so.
            if endpoints and not any(any_one.has(endpoint) for endpoint in endpoints):
                if highest is None or not any(the_highest.has(endpoint) for endpoint in endpoints):
                    break
                above = highest
            next_one = queue.next(now, above=above)
            if next_one is None or next_one.match is None:
                break
            blocked = self.limiter.blocked(next_one.meters) if next_one.meters else None
            if blocked is not None:
                queue.park(next_one, blocked.key)
                continue
            # A guaranteed share would be none if the room kept for the highest could not be had for it.
            is_highest = above is not None or highest is None or next_one.tenant.priority >= highest
            room = the_highest if is_highest else any_one
            answer = self._dispatcher.place(next_one, next_one.match, now, room.has)
            if answer is None:
                queue.set_aside(next_one)
                if queue.aside >= _MOST_ASIDE:
                    break
                continue
            if isinstance(answer, Rejection):
                queue.remove(next_one, now)
                if not self._fall_back(next_one, "unavailable", now):
                    self._refuse(next_one, answer, now)
                    continue
            else:
                queue.served(next_one, now)
                answer.lease.turn = (next_one.tenant.priority, next_one.flow, next_one.cost)
                self.counts.wait(pool, now - next_one.arrived_at)
                self._sent(next_one, answer, now)
            next_one.notify()
        queue.put_back()
        if shed:
            for ticket in queue.hopeless(now):
                self.counts.shed += 1
                self._refuse(ticket, refusals.overloaded(pool, 0.0), now)

    def _unpark(self, queue: PoolQueue) -> None:
        for key in queue.parked_keys():
            places = self.limiter.places(key)
            if places > 0:
                queue.unpark(key, places)

    def _shed(self, queue: PoolQueue, ticket: Ticket, now: float) -> None:
        queue.remove(ticket, now)
        assert ticket.match is not None
        self.counts.shed += 1
        self._refuse(ticket, refusals.queue_full(ticket.match.pool.name, 0.0), now)

    def _fall_back(self, ticket: Ticket, why: str, now: float) -> bool:
        """Send the request to its pool's fallback if that has room now."""
        match, tenant = ticket.match, ticket.tenant
        assert match is not None
        name = self.policy(match.pool.name).fallback
        if name is None or not tenant.fallback:
            return False
        if ticket.meters and self.limiter.blocked(ticket.meters) is not None:
            return False
        other = self._dispatcher.fallback(ticket.request, name)
        if other is None or not tenant.may_use(other.splice or ticket.request.model or ""):
            return False
        circuit = self.circuits.get(name)
        if circuit is not None and circuit.admits(now) > 0.0:
            return False
        waiting = self.queues.get(name)
        if waiting is not None and waiting.requests:
            return False
        answer = self._dispatcher.place(ticket, other, now, self._room(name, tenant, now).has)
        if not isinstance(answer, Decision):
            return False
        answer.fallback = other.splice or ticket.request.model or ""
        self.counts.fell_back(match.pool.name, name, why)
        self._sent(ticket, answer, now)
        return True

    def _sent(self, ticket: Ticket, decision: Decision, now: float) -> None:
        if ticket.meters:
            for meter in ticket.meters:
                meter.running += 1
            told = ticket.reserved.headers if ticket.reserved is not None else None
            decision.response = rate_headers(ticket.meters, now) if told is None else told
        ticket.answer = decision

    def _refuse(self, ticket: Ticket, rejection: Rejection, now: float) -> Ticket:
        """Answer with a rejection, which costs nothing; whoever waits is told."""
        waited = ticket.number > 0
        self._give_back(ticket, now)
        ticket.answer = rejection
        self.counts.refused(ticket.tenant.name, rejection.reason)
        if waited:
            ticket.notify()
        return ticket

    def _give_back(self, ticket: Ticket, now: float) -> None:
        if ticket.reserved is not None:
            ticket.reserved.refund(now)

    def _tell_circuit(self, settlement: Settlement, now: float) -> None:
        pool, busy = settlement.lease.pool, settlement.reason == "busy"
        if (settlement.outcome is Outcome.NEUTRAL and not busy) or self.on_trial(settlement.lease):
            return
        circuit = self.circuits.get(pool)
        failed = settlement.outcome is Outcome.FAILURE
        if circuit is None:
            if not failed and not busy:
                return
            circuit = self.circuits[pool] = Circuit()
        circuit.ended(failed=failed, busy=busy, error_rate=self.policy(pool).error_rate, now=now)


def limited_model(request: InferenceRequest, match: Match) -> str:
    """The name under which a request counts in limits: the one the engines know."""
    return match.splice or request.model or (match.pool.models[0] if match.pool.models else "")


def _allowed(request: InferenceRequest, match: Match, tenant: Tenant) -> bool:
    if request.model is not None and tenant.may_use(request.model):
        return True
    return tenant.may_use(limited_model(request, match))


def _serving(endpoints: Sequence[Endpoint], now: float) -> Sequence[Endpoint]:
    """Those whose room counts: ready and well ones, or all where there are none (the dispatcher then says why)."""
    well = [
        endpoint
        for endpoint in endpoints
        if endpoint.lifecycle is Lifecycle.READY
        and endpoint.spec.role is not Role.PREFILL
        and endpoint.health.admits(now, endpoint.leases)
    ]
    return well or endpoints
