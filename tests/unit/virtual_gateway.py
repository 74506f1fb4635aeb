"""The core before simulated engines in virtual time, for questions about admission: who is served when, and who is not."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from extproc.admission.decision import Decision
from extproc.admission.policy import Policy
from extproc.admission.rules import AdmissionRules
from extproc.admission.ticket import Ticket
from extproc.api.request import Api, InferenceRequest, Prompt, RequestHead
from extproc.core import Core
from extproc.fleet.endpoint import EndpointSpec
from extproc.limits.limit import LimitRules
from extproc.outcome import End, Usage
from extproc.routing.match import Router
from extproc.routing.pool import Pool
from extproc.routing.tenant import Tenant
from extproc.simulator.engine import Engine
from extproc.simulator.events import Finished, FirstToken
from extproc.simulator.job import Job
from extproc.simulator.profile import Profile

MODEL = "m"
BYTES_PER_TOKEN = 4
EVENT_BYTES = 200
"""Bytes of a streamed token."""


@dataclass(slots=True)
class Asked:
    """One request, and what became of it. Times in seconds since the start."""

    at: float
    tenant: Tenant
    prompt: int
    output: int
    max_tokens: int | None = None
    dispatched: float | None = None
    first: float | None = None
    done: float | None = None
    deadline: float = 0.0
    refused: str = ""

    @property
    def ttft(self) -> float:
        return float("inf") if self.first is None else self.first - self.at


@dataclass
class VirtualGateway:
    """Feed it requests; :meth:`run` returns when the last has ended. ``queue`` False: every request goes at once."""

    engines: int
    profile: Profile
    max_concurrency: int | None
    policy: Policy = field(default_factory=Policy)
    limits: LimitRules = field(default_factory=LimitRules)
    highest: int | None = None
    queue: bool = True
    usage: Callable[[random.Random], bool] = lambda rng: True
    seed: int = 1

    def run(self, asked: Sequence[Asked]) -> Core:
        self.core = Core(rng=random.Random(self.seed))
        specs = [
            EndpointSpec(f"e{n}", "10.0.0.1:8000", "p", models=(MODEL,), max_concurrency=self.max_concurrency)
            for n in range(self.engines)
        ]
        rules = AdmissionRules({"p": self.policy}, self.limits, self.highest)
        self.core.install(
            Router(
                {
                    "p": Pool(
                        "p",
                        models=(MODEL,),
                        strategy="expected-latency",
                        prefill_rate=self.profile.prefill_tokens_per_s,
                    )
                }
            ),
            specs,
            rules,
        )
        self._rng = random.Random(f"usage {self.seed}")
        self._engines = {spec.key: Engine(self.profile, random.Random(spec.key)) for spec in specs}
        self._flights: dict[str, tuple[Asked, str]] = {}
        self._tickets: dict[str, tuple[Asked, Ticket]] = {}
        self._plan: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        for number, one in enumerate(asked):
            self._at(one.at, lambda now, one=one, number=number: self._arrive(one, f"r{number}", now))
        self._at(0.5, self._housekeep)
        while self._plan:
            now, _, act = heapq.heappop(self._plan)
            act(now)
            if not (self._flights or self._tickets) and len(self._plan) == 1:
                break
        return self.core

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._plan, (when, self._order, act))

    def _arrive(self, one: Asked, name: str, now: float) -> None:
        size = one.prompt * BYTES_PER_TOKEN
        text = (name.encode() * (size // len(name) + 1))[:size]
        request = InferenceRequest(
            RequestHead(name, "POST", "/v1/chat/completions", "", {}),
            Api.CHAT,
            model=MODEL,
            stream=True,
            prompt=Prompt((text,), size=size),
            max_tokens=one.max_tokens,
            body_size=size,
        )
        if not self.queue:
            decided = self.core.dispatcher.decide(request, now, one.tenant)
            assert isinstance(decided, Decision)
            self._send(one, name, decided, now)
            return
        ticket = self.core.admission.submit(request, now, one.tenant)
        one.deadline = ticket.deadline
        self._tickets[name] = (one, ticket)
        self._answers(now)
        self._wake(now)

    def _answers(self, now: float) -> None:
        """Send what has been decided."""
        for name, (one, ticket) in list(self._tickets.items()):
            if ticket.answer is None:
                continue
            del self._tickets[name]
            if isinstance(ticket.answer, Decision):
                self._send(one, name, ticket.answer, now)
            else:
                one.refused = ticket.answer.reason

    def _send(self, one: Asked, name: str, decision: Decision, now: float) -> None:
        key = decision.choices[0].endpoint.key
        one.dispatched = now
        self._flights[name] = (one, key)
        engine = self._engines[key]
        self._events(key, now)
        engine.submit(Job(name, (), one.prompt, one.output), now)
        self._next(key)

    def _next(self, key: str) -> None:
        due = self._engines[key].next_event()
        if due is not None:
            self._at(due, lambda now: self._turn(key, now))

    def _turn(self, key: str, now: float) -> None:
        due = self._engines[key].next_event()
        if due is None or due > now:
            return
        self._events(key, now)
        self._answers(now)
        self._next(key)

    def _events(self, key: str, now: float) -> None:
        for event in self._engines[key].advance(now):
            if isinstance(event, FirstToken):
                one = self._flights[event.id][0]
                if one.first is None:
                    one.first = event.at
            elif isinstance(event, Finished):
                one, _ = self._flights.pop(event.id)
                one.done = event.at
                self._ended(one, event.id, key, now)

    def _ended(self, one: Asked, name: str, key: str, now: float) -> None:
        spec = self.core.fleet.endpoints[key].spec
        assert one.first is not None
        assert one.dispatched is not None
        assert one.done is not None
        known = self.usage(self._rng)
        self.core.take(
            End(
                name,
                spec.cluster,
                spec.address,
                200,
                ttft_s=one.first - one.dispatched,
                engine_s=one.done - one.dispatched,
                duration_s=one.done - one.at,
                response_bytes=one.output * EVENT_BYTES,
                usage=Usage(one.prompt, one.output, 0) if known else None,
            ),
            now,
        )

    def _wake(self, now: float) -> None:
        due = self.core.admission.next_wakeup(now)
        if due is not None and not getattr(self, "_armed", False):
            self._armed = True
            self._at(due, self._poll)

    def _poll(self, now: float) -> None:
        self._armed = False
        self.core.admission.poll(now)
        self._answers(now)
        self._wake(now)

    def _housekeep(self, now: float) -> None:
        self.core.housekeep(now)
        self._answers(now)
        self._at(now + 0.5, self._housekeep)


def poisson(
    rng: random.Random,
    tenants: Sequence[tuple[Tenant, float, tuple[int, int], tuple[int, int]]],
    seconds: float,
) -> list[Asked]:
    """Arrivals of (tenant, requests per second, bounds of prompt tokens, bounds of output tokens)."""
    out = []
    for tenant, rate, prompt, output in tenants:
        now = rng.expovariate(rate)
        while now < seconds:
            out.append(Asked(now, tenant, rng.randint(*prompt), rng.randint(*output)))
            now += rng.expovariate(rate)
    return sorted(out, key=lambda one: one.at)
