"""A trace through the core in virtual time.

Rules of this file:

- the core is the one of production and hears what it hears there, no more: a scrape of every engine each interval
  (spread over it, and as old as the lag says), the record of a request's end a little after the end, a renewal of
  streams that run for a minute, failed attempts, refused scrapes;
- a request that cannot reach its engine, or whose engine breaks off before the first token, goes to the next choice
  of its decision, as Envoy would send it; one that breaks off later has failed;
- a peer's policy that reads the response stream in its own gateway (:class:`StreamWatcher`) gets first tokens and
  ends at once;
- with an admission policy requests wait as in production, and a turn is taken whenever something may have made room:
  an end, a scrape, the queue's own timer;
- everything happens in order of (time, order of planning), randomness comes from the seed: the same setup gives the
  same run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from extproc.admission.decision import Decision
from extproc.admission.dispatcher import Considered
from extproc.admission.rules import AdmissionRules
from extproc.admission.ticket import Ticket
from extproc.core import Core
from extproc.engines.state import EngineState
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.ledger import Settlement
from extproc.outcome import End, FailedAttempt, Renewal, Usage
from extproc.replay.arrival import Arrival
from extproc.replay.faults import Fault
from extproc.replay.policies import Policy
from extproc.replay.prompts import MODEL, job_of, request_of
from extproc.replay.result import Run, Served
from extproc.replay.setup import Setup
from extproc.routing.match import Router
from extproc.routing.pool import Pool
from extproc.routing.rejection import Rejection
from extproc.scheduling.strategy import Choice, Strategy
from extproc.simulator.counters import EngineMetrics
from extproc.simulator.engine import Engine
from extproc.simulator.events import Finished, FirstToken, Rejected, Started
from extproc.telemetry.decision import DecisionRecord, record_of, render

_POOL = "replay"
_REFUSED_S = 0.001
_RENEW_S = 60.0
_HOUSEKEEP_S = 1.0
_SAMPLES = 120


@runtime_checkable
class StreamWatcher(Protocol):
    """A policy whose own gateway reads responses."""

    def first_token(self, request_id: str) -> None:
        """The first token of a request passed by."""

    def ended(self, request_id: str) -> None:
        """The response ended, or the request failed."""


@dataclass(slots=True)
class _Flight:
    """A request on its way."""

    number: int
    arrival: Arrival
    choices: Sequence[Choice]
    attempts: int = 0
    engine: int = -1
    sent_at: float = 0.0
    cached: int = 0
    first_at: float | None = None
    renewed_at: float = 0.0


class _Stand:
    """One engine with its faults and what its metrics page shows."""

    __slots__ = (
        "address",
        "cluster",
        "down",
        "endpoint",
        "engine",
        "flights",
        "frozen",
        "in_flight_s",
        "mute",
        "planned",
        "since",
        "total",
    )

    def __init__(self, engine: Engine, endpoint: Endpoint) -> None:
        self.engine = engine
        self.endpoint = endpoint
        self.cluster = endpoint.spec.cluster
        self.address = endpoint.spec.address
        self.flights: dict[str, _Flight] = {}
        self.planned = float("inf")
        """When the engine's next turn stands in the plan."""
        self.down = 0
        self.mute = 0
        self.frozen: EngineMetrics | None = None
        self.total = 0
        self.in_flight_s = 0.0
        self.since = 0.0


@dataclass(slots=True)
class _Explained:
    """The record of the one request that someone asked about."""

    id: str
    record: DecisionRecord | None = None

    def considered(self, considered: Considered, now: float) -> None:
        if considered.request.id == self.id:
            self.record = record_of(considered, now, 0.0)

    def settled(self, settlement: Settlement, now: float) -> None:
        if self.record is not None and settlement.lease.id == self.id:
            self.record.settled(settlement)


_Action = Callable[[float, Any], None]


@dataclass(slots=True)
class Driver:
    """One run; :meth:`run` may be called once."""

    arrivals: Sequence[Arrival]
    """In order of time."""
    setup: Setup
    policy: Policy
    explain: str | None = None
    on_progress: Callable[[int], None] = lambda done: None
    """Hears how many requests have arrived, every few hundred."""
    _plan: list[tuple[float, int, _Action, Any]] = field(default_factory=list)
    _order: int = 0
    _stands: list[_Stand] = field(default_factory=list)
    _number_of: dict[str, int] = field(default_factory=dict)
    _served: list[Served | None] = field(default_factory=list)
    _samples: list[tuple[float, list[int]]] = field(default_factory=list)
    _watchers: list[StreamWatcher] = field(default_factory=list)
    _open: int = 0
    """Requests that wait or run."""
    _waiting: dict[int, Ticket] = field(default_factory=dict)
    _answered: list[int] = field(default_factory=list)
    """Requests that waited and have their answer now."""
    _poll_at: float = float("inf")
    """When the queue's next timer stands in the plan."""
    _core: Core = field(init=False)

    def run(self) -> Run:
        """Replay all arrivals until the last one has ended."""
        explained = _Explained(self.explain) if self.explain is not None else None
        self._build(explained)
        self._served = [None] * len(self.arrivals)
        plan, arrivals, total = self._plan, self.arrivals, len(self.arrivals)
        at = 0
        while at < total or self._open:
            if at < total and (not plan or arrivals[at].at <= plan[0][0]):
                self._arrive(at)
                at += 1
                if not at % 256:
                    self.on_progress(at)
                continue
            now, _, action, what = heapq.heappop(plan)
            action(now, what)
            if self._answered:
                self._let_go(now)
        self.on_progress(total)
        ended = max((row.at + row.e2e_s for row in self._rows() if row.e2e_s is not None), default=0.0)
        for stand in self._stands:
            self._tick(stand, ended)
        return Run(
            policy=self.policy.name,
            served=self._rows(),
            seconds=ended,
            slo=self.setup.slo,
            requests_per_engine=[stand.total for stand in self._stands],
            in_flight_s=[stand.in_flight_s for stand in self._stands],
            samples=self._samples,
            preemptions=sum(stand.engine.counters.preemptions for stand in self._stands),
            explained=render(explained.record) if explained and explained.record else None,
        )

    # -- setting up --------------------------------------------------------------------------------

    def _build(self, explained: _Explained | None) -> None:
        setup = self.setup
        rng = random.Random(f"policy {setup.seed}")

        def build(name: str, options: Mapping[str, object], rng: random.Random) -> Strategy:
            strategy = self.policy.build(rng)
            if isinstance(strategy, StreamWatcher):
                self._watchers.append(strategy)
            return strategy

        self._core = Core(
            rng=rng,
            seed=setup.seed,
            max_blocks=1 << 60,
            block_bytes=4 * setup.resolution,
            on_considered=explained.considered if explained else None,
            on_settled=explained.settled if explained else None,
            build=build,
        )
        adapters = sorted({arrival.adapter for arrival in self.arrivals if arrival.adapter})
        models = (MODEL, *adapters)
        pool = Pool(
            _POOL,
            models=(MODEL,),
            adapters=tuple(adapters),
            strategy=self.policy.name,
            fallbacks=setup.fallbacks,
        )
        count = len(setup.engines)
        width = len(str(count - 1))
        specs = [
            EndpointSpec(f"engine-{n:0{width}}", "10.0.0.1:8000", _POOL, models=models) for n in range(count)
        ]
        rules = AdmissionRules({_POOL: setup.admission}) if setup.admission is not None else None
        self._core.install(Router({_POOL: pool}), specs, rules)
        for number, profile in enumerate(setup.engines):
            engine = Engine(profile, random.Random(f"engine {number} {setup.seed}"))
            self._stands.append(_Stand(engine, self._core.fleet.endpoints[specs[number].key]))
            self._number_of[specs[number].key] = number
            self._at(setup.scrape_interval_s * number / count, self._scrape, self._stands[number])
        self._at(_HOUSEKEEP_S, self._housekeep, None)
        self._at(0.0, self._sample, None)
        for fault in setup.faults:
            self._at(fault.at_s, self._strike, fault)
            if fault.for_s < float("inf"):
                self._at(fault.at_s + fault.for_s, self._mend, fault)

    def _at(self, at: float, action: _Action, what: Any) -> None:
        self._order += 1
        heapq.heappush(self._plan, (at, self._order, action, what))

    def _rows(self) -> list[Served]:
        return [row for row in self._served if row is not None]

    # -- a request ---------------------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        arrival = self.arrivals[number]
        now = arrival.at
        request = request_of(arrival, self.setup.bytes_per_token)
        self._open += 1
        if self.setup.admission is None:
            self._go(number, self._core.dispatcher.decide(request, now), now)
            return

        ticket = self._core.admission.submit(request, now, notify=lambda: self._answered.append(number))
        if ticket.number == 0 and ticket.answer is not None:
            self._go(number, ticket.answer, now)
            return
        self._waiting[number] = ticket
        self._plan_poll(now)
        self._let_go(now)

    def _go(self, number: int, answer: Decision | Rejection, now: float) -> None:
        """A request has its answer: it is sent, or was refused."""
        arrival = self.arrivals[number]
        if isinstance(answer, Rejection):
            self._open -= 1
            self._served[number] = Served(
                arrival.id, arrival.at, -1, arrival.prompt_tokens, 0, 0, None, None, answer.status
            )
        else:
            self._send(_Flight(number, arrival, answer.choices), now)

    def _let_go(self, now: float) -> None:
        answered, self._answered = self._answered, []
        for number in answered:
            answer = self._waiting.pop(number).answer
            assert answer is not None
            self._go(number, answer, now)

    def _plan_poll(self, now: float) -> None:
        due = self._core.admission.next_wakeup(now)
        if due is not None and due < self._poll_at:
            self._poll_at = due
            self._at(due, self._poll, None)

    def _poll(self, now: float, nothing: None) -> None:
        if now >= self._poll_at:
            self._poll_at = float("inf")
        self._core.admission.poll(now)
        self._plan_poll(now)

    def _send(self, flight: _Flight, now: float) -> None:
        """To the next choice; the request has failed when there is none left."""
        if flight.attempts == len(flight.choices):
            self._end(flight, now, 503, ("UF",))
            return
        choice = flight.choices[flight.attempts]
        number = self._number_of[choice.endpoint.key]
        stand = self._stands[number]
        flight.attempts += 1
        flight.engine = number
        flight.sent_at = now
        if stand.down:
            self._at(now + _REFUSED_S, self._refused, flight)
            return
        self._tick(stand, now)
        stand.total += 1
        stand.flights[flight.arrival.id] = flight
        stand.engine.submit(job_of(flight.arrival, stand.engine.profile.block_size), now)
        self._plan_turn(stand)

    def _refused(self, now: float, flight: _Flight) -> None:
        self._attempt_failed(flight, 503, ("UF",), now)

    def _attempt_failed(self, flight: _Flight, status: int, flags: tuple[str, ...], now: float) -> None:
        stand = self._stands[flight.engine]
        self._core.take(FailedAttempt(flight.arrival.id, stand.cluster, stand.address, status, flags), now)
        self._send(flight, now)

    def _plan_turn(self, stand: _Stand) -> None:
        due = stand.engine.next_event()
        if due is not None and due < stand.planned:
            stand.planned = due
            self._at(due, self._turn, stand)

    def _turn(self, now: float, stand: _Stand) -> None:
        if now >= stand.planned:
            stand.planned = float("inf")
        for event in stand.engine.advance(now):
            if isinstance(event, Started):
                flight = stand.flights[event.id]
                if flight.first_at is None:
                    flight.cached = event.cached_tokens
            elif isinstance(event, FirstToken):
                stand.flights[event.id].first_at = event.at
                for watcher in self._watchers:
                    watcher.first_token(event.id)
            elif isinstance(event, Finished):
                self._tick(stand, event.at)
                self._end(stand.flights.pop(event.id), event.at, 200, ())
            elif isinstance(event, Rejected):
                self._tick(stand, event.at)
                self._end(stand.flights.pop(event.id), event.at, 400, ())
        self._plan_turn(stand)

    def _end(self, flight: _Flight, now: float, status: int, flags: tuple[str, ...]) -> None:
        arrival = flight.arrival
        for watcher in self._watchers:
            watcher.ended(arrival.id)
        good = status == 200 and not flags
        first = flight.first_at if flight.first_at is not None or not good else now
        output = arrival.output_tokens if good else 0
        self._served[flight.number] = Served(
            arrival.id,
            arrival.at,
            flight.engine,
            arrival.prompt_tokens,
            flight.cached if good else 0,
            output,
            first - arrival.at if good and first is not None else None,
            now - arrival.at,
            status if not flags else 503,
        )
        stand = self._stands[flight.engine]
        ttft = None
        if first is not None:
            # A reply that is not streamed sends its first byte when all is done.
            ttft = first - flight.sent_at if arrival.stream else now - flight.sent_at
        usage = Usage(arrival.prompt_tokens, output, flight.cached) if good and self.setup.usage else None
        end = End(
            arrival.id,
            stand.cluster,
            stand.address,
            status,
            flags=flags,
            ttft_s=ttft,
            engine_s=now - flight.sent_at,
            waiting_s=flight.sent_at - arrival.at,
            duration_s=now - arrival.at,
            attempts=flight.attempts,
            usage=usage,
        )
        self._at(now + self.setup.record_delay_s, self._record, end)

    def _record(self, now: float, end: End) -> None:
        self._open -= 1
        self._core.take(end, now)

    # -- what goes on beside requests --------------------------------------------------------------

    def _scrape(self, now: float, stand: _Stand) -> None:
        """Read an engine's numbers; the gateway sees them after the lag, as if they were new."""
        self._at(now + self.setup.scrape_interval_s, self._scrape, stand)
        if stand.down or stand.mute:
            self._core.fleet.scrape_failed(stand.endpoint, now, refused=bool(stand.down))
            return
        metrics = stand.frozen or stand.engine.metrics(now)
        lag = self.setup.scrape_lag_s
        if lag:
            self._at(now + lag, self._show, (stand, metrics))
        else:
            self._show(now, (stand, metrics))

    def _show(self, now: float, shown: tuple[_Stand, EngineMetrics]) -> None:
        stand, metrics = shown
        profile, counters = stand.engine.profile, metrics.counters
        state = EngineState(
            at=now,
            running=metrics.running,
            waiting=metrics.waiting,
            kv_usage=metrics.kv_usage,
            kv_blocks=profile.kv_blocks,
            block_size=profile.block_size,
            prompt_tokens_total=counters.prompt_tokens,
            computed_prompt_tokens_total=counters.computed_prompt_tokens,
            first_tokens_total=counters.first_tokens,
            generation_tokens_total=counters.generation_tokens,
            counts_steps=True,
            requests_done_total=counters.finished,
            prefix_queries_total=counters.prefix_queries,
            prefix_hits_total=counters.prefix_hits,
            preemptions_total=counters.preemptions,
            max_lora=profile.max_loras or None,
            running_adapters=frozenset(metrics.running_adapters),
            waiting_adapters=frozenset(metrics.waiting_adapters),
        )
        self._core.fleet.scraped(stand.endpoint, state, now)
        if self.setup.admission is not None:
            self._core.admission.poll(now)

    def _housekeep(self, now: float, nothing: None) -> None:
        self._at(now + _HOUSEKEEP_S, self._housekeep, None)
        self._core.housekeep(now)
        if int(now) % 5:
            return
        for stand in self._stands:
            for flight in stand.flights.values():
                if now - max(flight.sent_at, flight.renewed_at) >= _RENEW_S:
                    flight.renewed_at = now
                    ttft = flight.first_at - flight.sent_at if flight.first_at is not None else None
                    ttft = ttft if flight.arrival.stream else None
                    self._core.take(Renewal(flight.arrival.id, stand.cluster, stand.address, ttft), now)

    def _sample(self, now: float, nothing: None) -> None:
        last = self.arrivals[-1].at if self.arrivals else 0.0
        self._at(now + max(last / _SAMPLES, 0.25), self._sample, None)
        self._samples.append((now, [len(stand.flights) for stand in self._stands]))

    def _tick(self, stand: _Stand, now: float) -> None:
        """The number of requests in flight is about to change: add up what it was."""
        if now > stand.since:
            stand.in_flight_s += len(stand.flights) * (now - stand.since)
            stand.since = now

    # -- faults ------------------------------------------------------------------------------------

    def _strike(self, now: float, fault: Fault) -> None:
        for number in fault.engines(len(self._stands)):
            stand = self._stands[number]
            if fault.kind == "slow":
                stand.engine.slowdown *= fault.factor
            elif fault.kind == "stall":
                stand.engine.stall(fault.for_s, now)
                self._plan_turn(stand)
            elif fault.kind == "down":
                self._break(number, now)
            elif fault.kind == "frozen-metrics":
                stand.frozen = stand.engine.metrics(now)
            else:
                stand.mute += 1

    def _mend(self, now: float, fault: Fault) -> None:
        for number in fault.engines(len(self._stands)):
            stand = self._stands[number]
            if fault.kind == "slow":
                stand.engine.slowdown /= fault.factor
            elif fault.kind == "down":
                stand.down -= 1
            elif fault.kind == "frozen-metrics":
                stand.frozen = None
            elif fault.kind == "no-metrics":
                stand.mute -= 1

    def _break(self, number: int, now: float) -> None:
        """The engine dies: a new one with an empty cache stands ready for when it may be reached again."""
        stand = self._stands[number]
        self._turn(now, stand)
        self._tick(stand, now)
        stand.down += 1
        slowdown = stand.engine.slowdown
        stand.engine = Engine(
            stand.engine.profile, random.Random(f"engine {number} again {now} {self.setup.seed}")
        )
        stand.engine.slowdown = slowdown
        stand.engine.advance(now)
        stand.planned = float("inf")
        flights, stand.flights = stand.flights, {}
        for flight in flights.values():
            if flight.first_at is None:
                self._attempt_failed(flight, 503, ("UC",), now)
            else:
                self._end(flight, now, 200, ("UC",))
