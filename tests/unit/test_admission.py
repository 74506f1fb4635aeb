"""Tickets: at once, after a wait, or not at all; and every reservation ended exactly once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.admission.circuit import Circuit
from extproc.admission.decision import Decision
from extproc.admission.policy import Policy
from extproc.admission.rules import AdmissionRules
from extproc.admission.ticket import Ticket
from extproc.core import Core
from extproc.engines.state import EngineState
from extproc.limits.limit import Limit, LimitRules
from extproc.routing.match import Router
from extproc.routing.pool import Pool
from extproc.routing.rejection import Rejection
from extproc.routing.tenant import Tenant
from tests.unit.core_parts import end, request, spec

A, B = Tenant("a"), Tenant("b")
ENGINE = spec("e", max_concurrency=1)


def core(
    *specs: object, limits: LimitRules | None = None, highest: int | None = None, **policy: object
) -> Core:
    built = Core(rng=random.Random(1))
    rules = AdmissionRules({"llama": replace(Policy(), **policy)}, limits or LimitRules(), highest)  # type: ignore[arg-type]
    pools = {
        "llama": Pool("llama", models=("llama-3",), strategy="least-requests"),
        "small": Pool("small", models=("llama-1",), strategy="least-requests"),
    }
    built.install(Router(pools, default_pool="llama"), specs or (ENGINE,), rules)  # type: ignore[arg-type]
    return built


def submit(built: Core, name: str, now: float = 0.0, tenant: Tenant = A, **more: object) -> Ticket:
    made = request(name)
    made.model_span = (0, 9)
    return built.admission.submit(made, now, tenant, **more)  # type: ignore[arg-type]


def finish(built: Core, name: str, now: float, **more: object) -> None:
    built.ledger.ended(end(name, built.ledger.leases[name].endpoint.spec, **more), now)  # type: ignore[arg-type]


def served(ticket: Ticket) -> bool:
    return isinstance(ticket.answer, Decision)


def reason(ticket: Ticket) -> str:
    return ticket.answer.reason if isinstance(ticket.answer, Rejection) else ""


def test_with_room_the_answer_is_there_at_once() -> None:
    built = core(spec("e"))
    assert all(served(submit(built, f"r{n}")) for n in range(500))
    assert built.admission.next_wakeup(0.0) is None


def test_without_room_it_waits_and_is_told_once_in_the_turn_that_frees_it() -> None:
    built = core()
    told: list[str] = []
    assert served(submit(built, "r1"))
    second = submit(built, "r2", notify=lambda: told.append("r2"))
    third = submit(built, "r3", notify=lambda: told.append("r3"))
    assert (second.answer, third.answer, told) == (None, None, [])
    finish(built, "r1", 1.0)
    assert served(second)
    assert (third.answer, told) == (None, ["r2"])
    assert second.answer.lease.waited_s == 1.0  # type: ignore[union-attr]
    finish(built, "r2", 2.0)
    assert (served(third), told) == (True, ["r2", "r3"])


def test_who_leaves_the_queue_gets_no_lease() -> None:
    built = core(limits=LimitRules(tenants={"a": Limit(rpm=60, tpm=60_000)}))
    submit(built, "r1")
    leaving = submit(built, "r2")
    built.admission.cancel(leaving, 0.5)
    built.admission.cancel(leaving, 0.5)
    finish(built, "r1", 1.0)
    assert (leaving.answer, built.ledger.leases) == (None, {})
    (meter,) = built.admission.limiter.meters(A, "llama-3", "llama", "", 1.0)
    assert meter.requests is not None
    assert meter.requests.left(0.5) == pytest.approx(59, abs=0.6)


def test_the_deadline_is_a_503_and_concerns_only_waiting() -> None:
    built = core(max_wait_s=5.0)
    running = submit(built, "r1")
    waiting = submit(built, "r2")
    assert built.admission.next_wakeup(4.95) == 5.0
    built.admission.poll(5.0)
    assert isinstance(waiting.answer, Rejection)
    assert (waiting.answer.status, waiting.answer.code) == (503, "queue_timeout")
    assert served(running)
    assert "r1" in built.ledger.leases


def test_a_pool_that_never_waits_refuses_at_once() -> None:
    built = core(max_wait_s=0.0)
    submit(built, "r1")
    assert reason(submit(built, "r2")) == "shed"


def test_a_tenants_own_longest_wait_goes_before_the_pools() -> None:
    built = core(max_wait_s=5.0)
    submit(built, "r1")
    assert submit(built, "r2", tenant=replace(A, max_wait_s=50.0)).deadline == 50.0


def test_concurrency_is_a_condition_of_dispatch_and_blocks_nobody_else() -> None:
    built = core(spec("e", max_concurrency=9), limits=LimitRules(tenants={"a": Limit(concurrency=1)}))
    assert served(submit(built, "a1"))
    second = submit(built, "a2")
    assert second.answer is None
    assert served(submit(built, "b1", tenant=B))
    finish(built, "b1", 1.0)
    assert second.answer is None
    finish(built, "a1", 2.0)
    assert served(second)
    finish(built, "a2", 3.0)
    (meter,) = built.admission.limiter.meters(A, "llama-3", "llama", "", 3.0)
    assert meter.running == 0


def test_the_room_kept_for_the_highest_priority_is_theirs_alone() -> None:
    high = Tenant("high", priority=10)
    built = core(spec("e", max_concurrency=4), highest=10, headroom=0.25)
    assert [served(submit(built, f"a{n}")) for n in range(4)] == [True, True, True, False]
    assert served(submit(built, "h", tenant=high))
    assert not served(submit(built, "h2", tenant=high))


def test_a_full_kv_cache_and_a_long_prefill_queue_are_no_room() -> None:
    built = core(spec("e"), max_ttft_s=1.0)
    (endpoint,) = built.fleet.pool("llama")
    assert served(submit(built, "r1"))
    built.fleet.scraped(endpoint, EngineState(0.1, kv_usage=0.97), 0.1)
    waiting = submit(built, "r2", 0.1)
    assert waiting.answer is None
    built.fleet.scraped(endpoint, EngineState(1.1, kv_usage=0.5), 1.1)
    built.admission.poll(1.1)
    assert served(waiting)
    endpoint.backlog.add(20_000, 1.2, endpoint.rates.prefill_at(1.2))
    assert submit(built, "r3", 1.2).answer is None


def test_what_metrics_do_not_say_makes_nobody_wait() -> None:
    built = core(spec("e"), max_ttft_s=1.0)
    (endpoint,) = built.fleet.pool("llama")
    built.fleet.scraped(endpoint, EngineState(0.0), 0.0)
    assert all(served(submit(built, f"r{n}", 0.1)) for n in range(50))


def test_without_any_endpoint_nobody_waits_for_one() -> None:
    built = core(spec("e", draining=True))
    assert reason(submit(built, "r1")) == "no_capacity"


def test_the_empty_place_of_a_dead_engine_is_no_room() -> None:
    built = core(spec("e", max_concurrency=1), spec("dead", max_concurrency=1))
    dead = built.fleet.pool("llama")[1]
    for _ in range(3):
        dead.health.failed(0.0)
    assert served(submit(built, "r1"))
    assert submit(built, "r2").answer is None
    built.admission.poll(0.5)
    assert dead.leases == 0
    assert built.admission.waiting == 1


def test_a_full_pool_falls_back_with_the_other_model_spliced_in() -> None:
    built = core(ENGINE, spec("s", "small"), fallback="small")
    submit(built, "r1")
    answer = submit(built, "r2").answer
    assert isinstance(answer, Decision)
    assert (answer.pool.name, answer.splice, answer.fallback) == ("small", "llama-1", "llama-1")
    assert built.admission.counts.fallbacks == {("llama", "small", "saturated"): 1}


@pytest.mark.parametrize(
    "tenant",
    [replace(A, fallback=False), replace(A, models=frozenset({"llama-3"}))],
    ids=["opt-out", "not allowed"],
)
def test_who_does_not_want_or_may_not_use_the_fallback_waits(tenant: Tenant) -> None:
    built = core(ENGINE, spec("s", "small"), fallback="small")
    submit(built, "r1")
    assert submit(built, "r2", tenant=tenant).answer is None


def test_a_fallback_only_for_long_waits_lets_short_ones_wait() -> None:
    built = core(ENGINE, spec("s", "small"), fallback="small", fallback_after_s=5.0, max_wait_s=10.0)
    submit(built, "r1")
    waiting = submit(built, "r2")
    assert waiting.answer is None
    built.admission.poll(10.0)
    assert isinstance(waiting.answer, Decision)
    assert waiting.answer.pool.name == "small"


def test_a_pool_without_usable_engines_falls_back() -> None:
    built = core(spec("e", draining=True), spec("s", "small"), fallback="small")
    answer = submit(built, "r1").answer
    assert isinstance(answer, Decision)
    assert answer.pool.name == "small"


def test_failures_open_the_pools_circuit_and_a_success_closes_it() -> None:
    built = core(spec("e"))
    for n in range(20):
        assert served(submit(built, f"r{n}", 0.1 * n))
        finish(built, f"r{n}", 0.1 * n, status=500)
    refused = submit(built, "x", 2.0)
    assert isinstance(refused.answer, Rejection)
    assert (refused.answer.status, refused.answer.reason) == (503, "circuit_open")
    assert refused.answer.retry_after_s == pytest.approx(4.9)
    probes = [submit(built, f"p{n}", 7.0) for n in range(5)]
    assert [served(one) for one in probes] == [True, True, True, False, False]
    finish(built, "p0", 7.5)
    assert served(submit(built, "y", 7.6))


def test_one_busy_engine_in_three_answers_keeps_the_circuit_closed() -> None:
    circuit = Circuit()
    for n in range(300):
        circuit.ended(failed=False, busy=n % 3 == 0, error_rate=0.3, now=n / 10)
    assert circuit.admits(30.0) == 0.0
    for _ in range(20):
        circuit.ended(failed=False, busy=True, error_rate=0.3, now=30.0)
    assert circuit.admits(30.1) == pytest.approx(0.9)


def test_who_may_not_use_every_model_must_name_one_that_can_be_read() -> None:
    built = core()
    restricted = replace(A, models=frozenset({"llama-3"}))
    for tenant, served_at_all in ((A, True), (restricted, False)):
        made = request(tenant.name + str(served_at_all))
        made.unread = True
        ticket = built.admission.submit(made, 0.0, tenant)
        assert served(ticket) is served_at_all
    assert reason(ticket) == "model_not_allowed"


def test_a_model_that_is_not_allowed_costs_nothing() -> None:
    built = core(limits=LimitRules(everything=Limit(rpm=1)))
    assert reason(submit(built, "r1", tenant=replace(A, models=frozenset({"x"})))) == "model_not_allowed"
    assert served(submit(built, "r2"))
    assert reason(submit(built, "r3")) == "limit_global_requests"


LIMITS = LimitRules(
    everything=Limit(rpm=6000, tpm=100_000),
    tenants={name: Limit(rpm=600, tpm=8000, tokens_per_day=30_000, concurrency=3) for name in "ab"},
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "arrive", "succeed", "fail", "client", "leave", "drop", "reload", "wait", "dead"]
        ),
        st.sampled_from("ab"),
        st.integers(1, 2000),
    ),
    max_size=80,
)


@settings(deadline=None)
@given(STEPS)
def test_whatever_happens_every_reservation_ends_once(steps: list[tuple[str, str, int]]) -> None:
    """Rates of zero would be no buckets, so time stands still: what is missing is exactly what was used."""
    built = core(spec("e", max_concurrency=4), limits=LIMITS, max_requests=6)
    admission, used, count = built.admission, {"a": 0.0, "b": 0.0}, 0
    open_: dict[str, Ticket] = {}
    for what, tenant, size in steps:
        running = [name for name, one in open_.items() if served(one) and name in built.ledger.leases]
        queued = [name for name, one in open_.items() if one.answer is None]
        if what == "arrive":
            count += 1
            name = f"r{count}"
            made = request(name, "x" * size)
            made.max_tokens = size
            open_[name] = admission.submit(made, 0.0, Tenant(tenant, priority=size % 3))
        elif what == "reload":
            admission.install(
                AdmissionRules({"llama": Policy(max_requests=6)}, LIMITS, None if size % 2 else 2), 0.0
            )
        elif what == "leave" and queued:
            admission.cancel(open_.pop(queued[size % len(queued)]), 0.0)
        elif what in ("succeed", "fail", "client", "drop", "dead") and running:
            name = running[size % len(running)]
            ticket = open_[name]
            if what == "drop":
                built.ledger.drop(name, 0.0)
            elif what == "dead":
                used[ticket.tenant.name] += ticket.reserved.tokens  # type: ignore[union-attr]
                lease = built.ledger.leases[name]
                lease.renewed_at = -1e9
                built.ledger.sweep(0.0)
            elif what == "succeed":
                used[ticket.tenant.name] += 30
                finish(built, name, 0.0)
            elif what == "fail":
                finish(built, name, 0.0, status=500, usage=None)
            else:
                finish(built, name, 0.0, status=0, flags=("DC",), usage=None)
        held = {"a": 0.0, "b": 0.0}
        going = {"a": 0, "b": 0}
        for name, one in open_.items():
            if one.answer is None or (served(one) and name in built.ledger.leases):
                held[one.tenant.name] += one.reserved.tokens  # type: ignore[union-attr]
                going[one.tenant.name] += served(one)
        for name in "ab":
            own, _ = admission.limiter.meters(Tenant(name), "llama-3", "llama", "", 0.0)
            assert own.tokens.capacity - own.tokens.left(0.0) == pytest.approx(held[name] + used[name])  # type: ignore[union-attr]
            assert own.day.used == pytest.approx(held[name] + used[name])  # type: ignore[union-attr]
            assert own.running == going[name] <= 3
