"""What letting requests in costs: identify, limits and dispatch without waiting, and a step of a long queue.

    python -m loadtest.admission

Times are medians over many calls inside one run; what admission adds is the difference to the bare decision, measured
in turns with it.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable

from extproc.admission.decision import Decision
from extproc.admission.policy import Policy
from extproc.admission.queue import PoolQueue
from extproc.admission.rules import AdmissionRules
from extproc.admission.ticket import Ticket
from extproc.api.request import Api, InferenceRequest, Prompt, RequestHead
from extproc.core import Core
from extproc.fleet.endpoint import EndpointSpec
from extproc.limits.limit import Limit, LimitRules
from extproc.routing.identity import Identity, digest
from extproc.routing.match import Router
from extproc.routing.pool import Pool
from extproc.routing.tenant import Tenant

_ENDPOINTS = 16
_PROMPT = b"x" * 4096
_BIG = Limit(rpm=1e9, tpm=1e12, tokens_per_day=1e15, concurrency=1_000_000)


def _core(limits: LimitRules) -> Core:
    core = Core(rng=random.Random(1))
    specs = [
        EndpointSpec(f"e{n}", "10.0.0.1:8000", "p", models=("m",), max_concurrency=1000)
        for n in range(_ENDPOINTS)
    ]
    core.install(Router({"p": Pool("p", models=("m",))}), specs, AdmissionRules({"p": Policy()}, limits))
    return core


def _request(name: str) -> InferenceRequest:
    head = RequestHead(name, "POST", "/v1/chat/completions", "", {"authorization": "Bearer sk-500"})
    prompt = Prompt((_PROMPT,), size=len(_PROMPT))
    return InferenceRequest(head, Api.CHAT, model="m", stream=True, prompt=prompt, body_size=len(_PROMPT))


def no_wait(rounds: int = 4000) -> dict[str, float]:
    """Microseconds of a bare decision, and of identifying, limiting and deciding (five limits hold)."""
    tenants = {digest(f"sk-{n}"): Tenant(f"t{n}") for n in range(1000)}
    identity = Identity(keys=tenants, enabled=True)
    limits = LimitRules(
        everything=_BIG,
        models={"m": _BIG},
        tenants={f"t{n}": _BIG for n in range(1000)},
        tenant_models={("t500", "m"): _BIG},
        client=_BIG,
    )
    bare, whole = _core(LimitRules()), _core(limits)
    plain, guarded = [], []
    for n in range(rounds):
        request = _request(f"r{n}")
        now = n / 1000
        began = time.perf_counter()
        decided = bare.dispatcher.decide(request, now)
        plain.append(time.perf_counter() - began)
        assert isinstance(decided, Decision)
        bare.ledger.drop(request.id, now)
        began = time.perf_counter()
        tenant = identity.identify(request.head, {})
        assert isinstance(tenant, Tenant)
        ticket = whole.admission.submit(request, now, tenant, client="10.0.0.1")
        guarded.append(time.perf_counter() - began)
        assert isinstance(ticket.answer, Decision)
        whole.ledger.drop(request.id, now)
    decide, all_of_it = _us(plain), _us(guarded)
    return {"decide_us": decide, "with_admission_us": all_of_it, "added_us": round(all_of_it - decide, 1)}


def queue_step(waiting: int, tenants: int, rounds: int = 4000) -> dict[str, float]:
    """Microseconds of joining, being next, and leaving early, with so many waiting requests of so many tenants."""
    rng = random.Random(1)
    queue = PoolQueue(Policy(max_requests=10**9, max_bytes=2**60))
    who = [Tenant(f"t{n}", priority=n % 3, weight=1 + n % 4) for n in range(tenants)]
    shared = _request("r")

    def ticket(now: float) -> Ticket:
        tenant = who[rng.randrange(tenants)]
        made = Ticket(shared, tenant, now, cost=float(rng.randint(100, 4000)), flow=tenant.name)
        made.deadline = now + 60
        return made

    inside = [ticket(0.0) for _ in range(waiting)]
    for one in inside:
        queue.push(one, 0.0)
    joins, serves, leaves = [], [], []
    for n in range(rounds):
        now = n / 10_000
        one, other = ticket(now), ticket(now)
        joins.append(_timed(lambda one=one, now=now: queue.push(one, now)))
        queue.push(other, now)

        def serve(now: float = now) -> None:
            head = queue.next(now)
            assert head is not None
            queue.served(head, now)

        serves.append(_timed(serve))
        inside.append(other)
        victim = inside[rng.randrange(len(inside))]
        if victim.waiting:
            leaves.append(_timed(lambda victim=victim, now=now: queue.remove(victim, now)))
    return {
        "waiting": waiting,
        "tenants": tenants,
        "join_us": _us(joins),
        "serve_us": _us(serves),
        "leave_us": _us(leaves),
    }


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _us(times: list[float]) -> float:
    return round(statistics.median(times) * 1e6, 1)


def main() -> None:
    """Print the numbers as JSON, a line each."""
    print(json.dumps({"no_wait": no_wait()}))
    for waiting, tenants in ((100, 10), (1000, 100), (10_000, 1000), (100_000, 10_000)):
        print(json.dumps({"queue_step": queue_step(waiting, tenants)}))


if __name__ == "__main__":
    main()
