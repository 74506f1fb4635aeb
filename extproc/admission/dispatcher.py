"""When and where in one step: a request comes in, a lease on an endpoint or a rejection comes out.

Rules of this file:

- the lease is opened in the same step as the choice, so that the next decision already sees it;
- fallbacks are the next best endpoints, other machines than the first; where there are not enough, those that rest or are
  on trial; never ones whose circuit is open, unless all are;
- a version is picked before the endpoint, sticky by session, by the weights of the route; a version with no usable
  endpoint gives its share to the others;
- strategies keep state, so they live as long as their configuration does not change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import xxhash

from extproc.admission.decision import Decision
from extproc.admission.ticket import Ticket
from extproc.api.request import InferenceRequest
from extproc.fleet.endpoint import Endpoint
from extproc.fleet.fleet import Fleet
from extproc.fleet.model_stats import ModelStats
from extproc.kvcache.view import CacheView, Look
from extproc.ledger import Lease, Ledger
from extproc.routing.match import Match, Router
from extproc.routing.pool import Pool
from extproc.routing.rejection import Rejection, no_capacity
from extproc.routing.route import Route
from extproc.routing.tenant import ANONYMOUS, Tenant
from extproc.scheduling.disaggregation import Prefiller, choose, prefillers
from extproc.scheduling.eligible import eligible
from extproc.scheduling.registry import build as build_strategy
from extproc.scheduling.sessions import Sessions, pinned
from extproc.scheduling.strategy import Candidate, Choice, Query, Strategy

__all__ = ["Considered", "Decision", "Dispatcher"]


@dataclass(slots=True)
class Considered:
    """Everything one decision looked at, for the decision record. Kept by reference: rendering is for who asks."""

    request: InferenceRequest
    tenant: Tenant
    match: Match
    strategy: str
    terms: tuple[str, ...]
    query: Query
    ranked: Sequence[Choice]
    removed: Sequence[tuple[Endpoint, str]]
    decision: Decision | None
    rejection: Rejection | None = None


class Dispatcher:
    """The decision core. Sans-IO: production and replay feed it requests and ``now`` (monotonic seconds)."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        view: CacheView,
        models: ModelStats,
        rng: random.Random,
        on_considered: Callable[[Considered, float], None] | None = None,
        build: Callable[[str, Mapping[str, object], random.Random], Strategy] = build_strategy,
    ) -> None:
        self.fleet = fleet
        self.ledger = ledger
        self.view = view
        self.models = models
        self.on_considered = on_considered
        self.version_for: Callable[[str, str, Mapping[str, str]], tuple[str, str] | None] = (
            lambda pool, key, headers: None
        )
        """(pool, sticky key, headers) -> version and arm, where a release rules; goes before weights of routes."""
        self.queued: Callable[[str], int] = lambda pool: 0
        """Pool -> requests that wait for it in the gateway."""
        self.sessions = Sessions()
        self._rng = rng
        self._build = build
        self._router = Router({})
        self._strategies: dict[tuple[str, str, str], Strategy] = {}
        self._tick = 0

    def install(self, router: Router) -> None:
        """Take over a new routing configuration; strategies whose configuration is unchanged keep their state."""
        wanted: dict[tuple[str, str, str], Strategy] = {}
        for pool in router.pools.values():
            for route in (None, *(route for route in router.routes if route.pool == pool.name)):
                key, name, options = _strategy_of(pool, route)
                if key not in wanted:
                    wanted[key] = self._strategies.get(key) or self._build(name, options, self._rng)
        self._strategies = wanted
        self._router = router

    @property
    def router(self) -> Router:
        """The routing configuration in use."""
        return self._router

    def match(self, request: InferenceRequest, tenant: Tenant) -> Match | Rejection:
        """The pool and route that answer a request."""
        return self._router.match(request, tenant, self.fleet.adapters.pool_of)

    def fallback(self, request: InferenceRequest, pool: str) -> Match | None:
        """The request into a fallback pool; None when it cannot go there."""
        return self._router.fallback(request, pool)

    def decide(
        self, request: InferenceRequest, now: float, tenant: Tenant = ANONYMOUS
    ) -> Decision | Rejection:
        """Match, choose, open the lease. No waiting: a full pool gives its least costly endpoint."""
        ticket = Ticket(request, tenant, now)
        match = self.match(request, tenant)
        if isinstance(match, Rejection):
            return match
        placed = self.place(ticket, match, now)
        assert placed is not None
        return placed

    def place(
        self, ticket: Ticket, match: Match, now: float, room: Callable[[Endpoint], bool] | None = None
    ) -> Decision | Rejection | None:
        """Choose, open the lease. ``room`` bounds the choice; None is returned when only room is missing."""
        request, tenant, pool = ticket.request, ticket.tenant, match.pool
        model = match.splice or request.model or ""
        version, arm = self._version(pool.name, match.route, request)
        configured = match.adapter in pool.adapters  # then every endpoint of the pool can load it
        usable, removed = eligible(
            self.fleet.pool(pool.name),
            now,
            version=version,
            adapter="" if configured else match.adapter or "",
            policy=self.fleet.policy,
            room=room,
        )
        if not usable and any(word == "full" for _, word in removed):
            return None
        key, name, _ = _strategy_of(pool, match.route)
        strategy = self._strategies[key]
        look = self.view.look(
            request.prompt,
            pool.models[0] if pool.models else model,
            adapter=match.adapter or "",
            cache_salt=request.cache_salt,
        )
        query = self._query(request, model, match.adapter or "", look, pool.name)
        if request.session:
            query.session_endpoint = self.sessions.of(pool.name, request.session, now) or ""
            query.session_saves_s = self.sessions.saves_s
        if not usable:
            why = ", ".join(sorted({word for _, word in removed})) or "none is configured"
            rejection = no_capacity(pool.name, why)
            self._report(request, tenant, match, name, strategy, query, [], removed, None, rejection, now)
            return rejection
        query.queued = self.queued(pool.name) / len(usable)
        held = self.view.match(look)
        candidates = [Candidate(endpoint, held.get(endpoint.slot, 0)) for endpoint in usable]
        ranked = strategy.rank(query, candidates, now)
        if match.route.pin and query.session_endpoint:
            ranked = pinned(ranked, query.session_endpoint)
        ranked, prefiller = self._prefill(match, strategy, ranked, held, query, now)
        first = ranked[0]
        chosen = [first, *_others(ranked, removed, pool.fallbacks, now)]
        self._tick += 1
        first.endpoint.tick = self._tick
        if query.adapter:
            first.endpoint.asked_for(query.adapter)
        lease = Lease(
            request.id,
            first.endpoint,
            now,
            pool=pool.name,
            version=first.endpoint.spec.version,
            arm=arm,
            model=model,
            adapter=query.adapter,
            tenant=tenant.name,
            route=match.route.name,
            api=request.api,
            stream=request.stream,
            prompt_bytes=request.prompt.size,
            prompt_tokens=query.prompt_tokens,
            uncached_tokens=max(query.prompt_tokens - first.matched_tokens, 0),
            attention=query.attention,
            output_tokens=query.output_tokens,
            fallbacks=tuple(choice.endpoint for choice in chosen[1:]),
            retry_busy=len(chosen) > 1 and self.ledger.retries.request(pool.name),
            session=request.session or "",
            look=look,
            prefiller=prefiller.endpoint if prefiller is not None else None,
            prefiller_tokens=prefiller.uncached_tokens if prefiller is not None else 0,
            meters=ticket.meters,
            reserved=ticket.reserved,
            waited_s=now - ticket.arrived_at,
        )
        decision = Decision(lease, pool, match.route, chosen, match.splice)
        self._report(request, tenant, match, name, strategy, query, ranked, removed, decision, None, now)
        header = pool.disaggregation.header
        if prefiller is not None:
            decision.headers += ((header, prefiller.endpoint.spec.address),)
        elif header in request.head.headers:
            # Only we may name a prefill endpoint; an empty header names none.
            decision.headers += ((header, ""),)
        if request.session:
            self.sessions.decided(pool.name, request.session, first.endpoint, now)
        self.ledger.open(lease, now)
        return decision

    def _prefill(
        self,
        match: Match,
        strategy: Strategy,
        ranked: list[Choice],
        held: Mapping[int, int],
        query: Query,
        now: float,
    ) -> tuple[list[Choice], Prefiller | None]:
        """Where to prefill, in pools with endpoints for that, and the choices in the order that it makes best."""
        pool = match.pool
        candidates = prefillers(self.fleet.pool(pool.name), now, match.adapter or "")
        if not candidates:
            return ranked, None
        in_seconds = bool(strategy.terms) and all(term.endswith(" s") for term in strategy.terms)
        ranked, prefiller = choose(
            ranked,
            candidates,
            held,
            query.prompt_tokens,
            now,
            min_uncached_tokens=pool.disaggregation.min_uncached_tokens,
            transfer_rate=pool.disaggregation.transfer_rate,
            attention=query.attention,
            in_seconds=in_seconds and not (match.route.pin and query.session_endpoint),
        )
        if prefiller is not None:
            prefiller.endpoint.tick = self._tick + 1
        return ranked, prefiller

    def _version(self, pool: str, route: Route, request: InferenceRequest) -> tuple[str | None, str]:
        """The version to take, None for any, and the arm of a release that the request counts for."""
        released = self.version_for(pool, _sticky(request), request.head.headers)
        if released is not None:
            return released
        return (_pick_version(route, request) if route.weights else None), ""

    def _query(self, request: InferenceRequest, model: str, adapter: str, look: Look, pool: str) -> Query:
        return Query(
            request.id,
            model=model,
            prompt_tokens=look.prompt_tokens,
            output_tokens=self.models.output_tokens(model, request.max_tokens)
            if request.api.generates
            else 0,
            stream=request.stream,
            affinity_key=request.session or request.user or (f"{look.hashes[0]:x}" if look.hashes else ""),
            adapter=adapter,
            attention=self.models.attention(pool).share,
            blocks=look.hashes,
        )

    def _report(
        self,
        request: InferenceRequest,
        tenant: Tenant,
        match: Match,
        name: str,
        strategy: Strategy,
        query: Query,
        ranked: Sequence[Choice],
        removed: Sequence[tuple[Endpoint, str]],
        decision: Decision | None,
        rejection: Rejection | None,
        now: float,
    ) -> None:
        if self.on_considered is not None:
            self.on_considered(
                Considered(
                    request, tenant, match, name, strategy.terms, query, ranked, removed, decision, rejection
                ),
                now,
            )


def _pick_version(route: Route, request: InferenceRequest) -> str:
    names = sorted(route.weights)
    total = sum(route.weights.values())
    key = _sticky(request)
    point = xxhash.xxh3_64_intdigest(f"{route.name}\0{key}".encode()) / 2**64 * total
    for name in names:
        point -= route.weights[name]
        if point < 0:
            return name
    return names[-1]


def _others(
    ranked: Sequence[Choice], removed: Sequence[tuple[Endpoint, str]], count: int, now: float
) -> list[Choice]:
    first = ranked[0].endpoint
    found = [choice for choice in ranked[1:] if choice.endpoint is not first][:count]
    if len(found) < count and removed:
        spare = (e for e, word in removed if word == "excluded" and not e.health.excluded(now))
        found.extend(Choice(endpoint) for endpoint in islice(spare, count - len(found)))
    return found


def _sticky(request: InferenceRequest) -> str:
    return request.session or request.user or request.id


def _strategy_of(pool: Pool, route: Route | None) -> tuple[tuple[str, str, str], str, Mapping[str, object]]:
    if route is not None and route.strategy is not None:
        name, options = route.strategy, route.strategy_options
        return (f"route {route.name}", name, repr(sorted(options.items()))), name, options
    name, options = pool.strategy, pool.strategy_options
    return (f"pool {pool.name}", name, repr(sorted(options.items()))), name, options
