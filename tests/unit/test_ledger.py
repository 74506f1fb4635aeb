"""Leases: opened with the decision, moved with retries, closed exactly once, and nothing left behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.dispatcher import Decision
from extproc.core import Core
from extproc.ledger import Lease
from extproc.outcome import End, FailedAttempt, Renewal
from tests.unit.core_parts import core, end, request, spec

A, B, C = spec("a"), spec("b"), spec("c")


def opened(built: Core, request_id: str = "r1", now: float = 0.0, text: str = "hello " * 400) -> Lease:
    decided = built.dispatcher.decide(request(request_id, text), now)
    assert isinstance(decided, Decision)
    return decided.lease


def assert_nothing_left(built: Core) -> None:
    assert not built.ledger.leases
    for endpoint in built.fleet.endpoints.values():
        assert endpoint.leases == 0
        assert endpoint.backlog.charged == 0
        assert endpoint.backlog.unstarted == 0


def test_a_decision_charges_its_endpoint_at_once() -> None:
    built = core([A, B])
    lease = opened(built)
    assert lease.endpoint.leases == 1
    assert lease.endpoint.backlog.charged == lease.work > lease.uncached_tokens > 0


def test_the_final_record_closes_the_lease() -> None:
    built = core([A, B])
    lease = opened(built)
    settlement = built.ledger.ended(end("r1", lease.endpoint.spec), 1.0)
    assert settlement is not None
    assert settlement.outcome == "success"
    assert_nothing_left(built)


def test_a_second_final_record_is_late_not_unknown() -> None:
    built = core([A])
    lease = opened(built)
    built.ledger.ended(end("r1", lease.endpoint.spec), 1.0)
    assert built.ledger.ended(end("r1", lease.endpoint.spec), 1.1) is None
    assert (built.ledger.counts.late, built.ledger.counts.unknown) == (1, 0)


def test_an_id_never_decided_is_counted_as_unknown() -> None:
    built = core([A])
    assert built.ledger.ended(end("zzz", A), 1.0) is None
    assert built.ledger.counts.unknown == 1


def test_a_request_that_nobody_decided_and_no_engine_saw_is_no_news() -> None:
    built = core([A])
    built.ledger.ended(End("zzz", "", "", 0, flags=("DC",)), 1.0)
    assert (built.ledger.counts.unknown, built.ledger.counts.late) == (0, 0)


def test_a_failed_attempt_moves_the_lease_to_its_fallback() -> None:
    built = core([A, B])
    lease = opened(built)
    first, second = lease.endpoint, lease.fallbacks[0]
    built.ledger.attempt_failed(
        FailedAttempt("r1", first.spec.cluster, first.spec.address, 503, ("UF",)), 0.1
    )
    assert (first.leases, second.leases) == (0, 1)
    assert lease.endpoint is second
    assert first.health.failures == 1
    assert built.view.held(first, lease.look) == 0
    assert built.view.held(second, lease.look) > 0


def test_without_a_record_of_the_attempt_the_final_record_moves_the_lease() -> None:
    built = core([A, B])
    lease = opened(built)
    second = lease.fallbacks[0]
    settlement = built.ledger.ended(end("r1", second.spec, attempts=2), 1.0)
    assert settlement is not None
    assert settlement.lease.endpoint is second
    assert second.stats.minute.success(1.0) == 1.0
    assert_nothing_left(built)


def test_one_broken_request_is_one_failure_whichever_record_comes_first() -> None:
    for attempt_first in (True, False):
        built = core([A], fallbacks=0)
        endpoint = opened(built).endpoint
        attempt = FailedAttempt("r1", "a", A.address, 200, ("UC",))
        final = end("r1", A, flags=("UC",))
        if attempt_first:
            built.ledger.attempt_failed(attempt, 0.1)
            built.ledger.ended(final, 0.1)
        else:
            built.ledger.ended(final, 0.1)
            built.ledger.attempt_failed(attempt, 0.1)
        assert endpoint.health.failures == 1
        assert_nothing_left(built)


def test_a_busy_engine_is_not_a_broken_one() -> None:
    built = core([A, B])
    lease = opened(built)
    first = lease.endpoint
    built.ledger.attempt_failed(FailedAttempt("r1", first.spec.cluster, first.spec.address, 503, ()), 0.1)
    assert first.health.failures == 0
    assert lease.endpoint is not first


def test_a_client_error_is_neutral() -> None:
    built = core([A])
    for n in range(50):
        opened(built, f"r{n}")
        built.ledger.ended(end(f"r{n}", A, status=400), 1.0)
    endpoint = built.fleet.endpoints[A.key]
    assert endpoint.health.failures == 0
    assert endpoint.stats.minute.success(1.0) is None


def test_a_client_that_left_before_the_answer_reached_envoy_leaves_nothing() -> None:
    built = core([A])
    lease = opened(built)
    built.ledger.drop("r1", 0.1)
    assert built.view.held(lease.endpoint, lease.look) == 0
    assert_nothing_left(built)
    built.ledger.ended(end("r1", A, flags=("DC",)), 0.2)
    assert built.ledger.counts.late == 1


def test_a_failure_before_the_first_byte_undoes_the_claim_on_the_cache() -> None:
    built = core([A], fallbacks=0)
    lease = opened(built)
    built.ledger.ended(end("r1", A, status=503, flags=("UF",), ttft_s=None), 0.1)
    assert built.view.held(lease.endpoint, lease.look) == 0


def test_an_endpoint_whose_cluster_has_no_host_is_left_alone() -> None:
    built = core([A], fallbacks=0)
    for number in range(3):
        lease = opened(built, f"r{number}")
        nowhere = End(f"r{number}", "", "", 503, flags=("UH",))
        built.ledger.ended(nowhere, 0.1)
        assert_nothing_left(built)
    assert not lease.endpoint.health.admits(0.2, 0)


def test_a_served_prompt_stays_in_the_index() -> None:
    built = core([A])
    lease = opened(built)
    built.ledger.ended(end("r1", A), 1.0)
    assert built.view.held(lease.endpoint, lease.look) > 0


def test_running_streams_renew_and_silent_leases_die() -> None:
    built = core([A])
    opened(built, "alive")
    opened(built, "silent")
    built.ledger.renewed(Renewal("alive", "a", A.address, 0.2), 120.0)
    assert built.ledger.sweep(200.0) == 1
    assert list(built.ledger.leases) == ["alive"]


def test_a_restarted_process_adopts_running_streams() -> None:
    built = core([A])
    built.ledger.renewed(Renewal("from-before", "a", A.address, 0.2), 5.0)
    endpoint = built.fleet.endpoints[A.key]
    assert endpoint.leases == 1
    assert endpoint.backlog.charged == 0
    built.ledger.ended(end("from-before", A), 9.0)
    assert_nothing_left(built)
    assert built.ledger.counts.unknown == 0


def test_a_restart_of_the_engine_between_claim_and_end_is_respected() -> None:
    built = core([A], fallbacks=0)
    lease = opened(built)
    built.fleet.restarted(lease.endpoint)
    again = opened(built, "r2")
    built.ledger.ended(end("r1", A, status=503, flags=("UF",), ttft_s=None), 0.1)
    assert built.view.held(again.endpoint, again.look) > 0


def test_an_endpoint_removed_under_a_lease_is_settled_without_harm() -> None:
    built = core([A, B])
    lease = opened(built)
    gone = lease.endpoint
    rest = [s for s in (A, B) if s.key != gone.key]
    built.fleet.apply([*rest, C])
    built.ledger.ended(end("r1", gone.spec), 1.0)
    assert gone.leases == 0
    assert_nothing_left(built)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["open", "fail", "busy", "renew", "end", "cut", "gone", "drop", "sweep", "restart", "reload"]
        ),
        st.integers(0, 5),
        st.sampled_from("abc"),
    ),
    max_size=80,
)


@given(EVENTS)
def test_whatever_happens_every_counter_returns_to_zero(events: list[tuple[str, int, str]]) -> None:
    settled: list[str] = []
    built = core(
        [A, B, C], fallbacks=2, on_settled=lambda settlement, now: settled.append(settlement.lease.id)
    )
    specs = {"a": A, "b": B, "c": C}
    now = 0.0
    for word, number, name in events:
        now += 1.0
        request_id, where = f"r{number}", specs[name]
        if word == "open":
            if request_id not in built.ledger.leases:
                opened(built, request_id, now, text=f"{number} " * 600)
        elif word in ("fail", "busy"):
            flags = ("UF",) if word == "fail" else ()
            built.ledger.attempt_failed(FailedAttempt(request_id, name, where.address, 503, flags), now)
        elif word == "renew":
            built.ledger.renewed(Renewal(request_id, name, where.address, 0.1), now)
        elif word == "end":
            built.ledger.ended(end(request_id, where), now)
        elif word == "cut":
            built.ledger.ended(end(request_id, where, flags=("UC",)), now)
        elif word == "gone":
            built.ledger.ended(end(request_id, where, flags=("DC",), ttft_s=None), now)
        elif word == "drop":
            built.ledger.drop(request_id, now)
        elif word == "restart" and built.fleet.endpoints.get(where.key):
            built.fleet.restarted(built.fleet.endpoints[where.key])
        elif word == "reload":
            built.fleet.apply([s for s in specs.values() if s is not where] if number % 2 else specs.values())
        else:
            built.ledger.sweep(now)
        assert sum(e.leases for e in built.fleet.endpoints.values()) <= len(built.ledger.leases)
    built.ledger.sweep(now + 1000)
    assert_nothing_left(built)
    assert len(settled) == built.ledger.counts.opened == built.ledger.counts.closed
