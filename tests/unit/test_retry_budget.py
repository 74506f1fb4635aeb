"""The retry budget of a pool, alone and as the ledger spends it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.dispatcher import Decision
from extproc.core import Core
from extproc.fleet.retry_budget import RetryBudget
from extproc.outcome import FailedAttempt
from tests.unit.core_parts import core, end, request, spec

A, B = spec("a", port=8001), spec("b", port=8002)


def test_a_pool_starts_with_its_burst() -> None:
    budget = RetryBudget(share=0.0, burst=3)
    allowed = 0
    for _ in range(10):
        if budget.request("p"):
            budget.spend("p")
            allowed += 1
    assert allowed == 3
    assert (budget.spent_total, budget.withheld_total) == ({"p": 3}, {"p": 7})


def test_five_requests_earn_a_retry() -> None:
    budget = RetryBudget(share=0.2, burst=1)
    budget.request("p")
    budget.spend("p")
    assert [budget.request("p") for _ in range(5)] == [False, False, False, False, True]


def test_pools_do_not_share() -> None:
    budget = RetryBudget(share=0.0, burst=1)
    budget.spend("p")
    assert not budget.request("p")
    assert budget.request("q")


def test_retries_under_way_are_paid_back() -> None:
    budget = RetryBudget(share=0.2, burst=2)
    budget.spend("p", 10)
    assert budget.left("p") == -8
    allowed = [budget.request("p") for _ in range(50)]
    assert allowed.index(True) == 44


def test_other_bounds_keep_what_is_saved_within_them() -> None:
    budget = RetryBudget(share=0.2, burst=10)
    budget.request("p")
    budget.rule(0.5, 2)
    assert budget.left("p") == 2
    assert budget.left("new") == 2


def test_pools_that_are_gone_are_forgotten() -> None:
    budget = RetryBudget()
    budget.request("p")
    budget.spend("p")
    budget.forget({"q"})
    assert (budget.spent_total, budget.withheld_total, budget.left("p")) == ({}, {}, 10.0)


@given(
    share=st.floats(0, 1),
    burst=st.integers(0, 20),
    at_once=st.integers(1, 30),
    requests=st.integers(1, 400),
)
def test_attempts_stay_below_the_share_whatever_is_under_way(
    share: float, burst: int, at_once: int, requests: int
) -> None:
    """Everything fails, and up to ``at_once`` requests run before the first of them is heard of."""
    budget, owed, spent = RetryBudget(share, burst), 0, 0
    for number in range(requests):
        owed += budget.request("p")
        if (number + 1) % at_once == 0:
            budget.spend("p", owed)
            spent, owed = spent + owed, 0
    assert spent <= share * requests + burst + at_once


def decided(built: Core, request_id: str) -> Decision:
    found = built.dispatcher.decide(request(request_id), 0.0)
    assert isinstance(found, Decision)
    return found


def budget_of(built: Core, burst: float = 2.0) -> RetryBudget:
    built.ledger.retries.rule(0.0, burst)
    return built.ledger.retries


def attempt(request_id: str, at: object, status: int, *flags: str) -> FailedAttempt:
    endpoint = at.spec  # type: ignore[attr-defined]
    return FailedAttempt(request_id, endpoint.cluster, endpoint.address, status, flags)


def test_a_busy_attempt_with_a_fallback_spends() -> None:
    built = core([A, B])
    budget = budget_of(built)
    lease = decided(built, "r1").lease
    first, second = lease.endpoint, lease.fallbacks[0]
    built.ledger.attempt_failed(attempt("r1", first, 503), 0.1)
    built.ledger.ended(end("r1", second.spec, attempts=2), 0.2)
    assert budget.left("llama") == 1


def test_a_retry_known_from_the_final_record_alone_spends() -> None:
    built = core([A, B])
    budget = budget_of(built)
    lease = decided(built, "r1").lease
    built.ledger.ended(end("r1", lease.fallbacks[0].spec, attempts=2), 0.2)
    assert budget.left("llama") == 1


def test_connections_that_could_not_be_made_are_exempt_in_any_order() -> None:
    for record_first in (True, False):
        built = core([A, B])
        budget = budget_of(built)
        lease = decided(built, "r1").lease
        first, second = lease.endpoint, lease.fallbacks[0]
        record, final = attempt("r1", first, 503, "UF"), end("r1", second.spec, attempts=2)
        if record_first:
            built.ledger.attempt_failed(record, 0.1)
            built.ledger.ended(final, 0.2)
        else:
            built.ledger.ended(final, 0.1)
            built.ledger.attempt_failed(record, 0.2)
        assert budget.left("llama") == 2


def test_the_only_endpoint_spends_nothing() -> None:
    built = core([A])
    budget = budget_of(built)
    assert not decided(built, "r1").lease.retry_busy
    built.ledger.attempt_failed(attempt("r1", built.fleet.pool("llama")[0], 503), 0.1)
    built.ledger.ended(end("r1", A, status=503), 0.1)
    assert budget.left("llama") == 2


def test_without_budget_fallbacks_stay_for_connections_that_cannot_be_made() -> None:
    built = core([A, B])
    budget_of(built, burst=0.0)
    decision = decided(built, "r1")
    assert not decision.lease.retry_busy
    assert len(decision.choices) == 2
