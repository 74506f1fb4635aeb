"""Sessions: remembered for a while, a hint in seconds, a pin where the route says so."""

from __future__ import annotations

from extproc.fleet.endpoint import Endpoint
from extproc.routing.match import Router
from extproc.routing.pool import Pool
from extproc.routing.route import Route, RouteMatch
from extproc.scheduling.sessions import Sessions
from tests.unit.core_parts import core, request, spec

A, B = Endpoint(spec("a"), 0), Endpoint(spec("b"), 1)


def test_a_session_is_remembered_for_its_time_since_the_last_request() -> None:
    sessions = Sessions(ttl_s=10)
    sessions.decided("pool", "s", A, 0.0)
    assert sessions.of("pool", "s", 9.0) == A.key
    assert sessions.of("other", "s", 9.0) is None
    sessions.decided("pool", "s", B, 9.0)
    assert sessions.of("pool", "s", 18.0) == B.key
    assert sessions.of("pool", "s", 19.5) is None
    assert len(sessions) == 0


def test_the_longest_unused_go_first_when_there_are_too_many() -> None:
    sessions = Sessions(most=2)
    for name in "xyxz":
        sessions.decided("pool", name, A, 0.0)
    assert [sessions.of("pool", name, 0.0) for name in "xyz"] == [A.key, None, A.key]


def test_sweeping_forgets_those_whose_time_is_over() -> None:
    sessions = Sessions(ttl_s=10)
    sessions.decided("pool", "old", A, 0.0)
    sessions.decided("pool", "new", A, 8.0)
    sessions.sweep(12.0)
    assert len(sessions) == 1


def test_a_hint_outweighs_small_differences_and_not_large_ones() -> None:
    made = core([spec("a"), spec("b", port=8001)], strategy="expected-latency")
    made.dispatcher.sessions.saves_s = 0.5

    def place(number: int, session: str | None) -> str:
        decided = made.dispatcher.decide(request(f"r{number}", "x" * number, session=session), 0.0)
        return decided.lease.endpoint.spec.cluster  # type: ignore[union-attr]

    first = place(1, "s")
    assert [place(number, "s") for number in range(2, 6)] == [first] * 4
    made.fleet.endpoints[f"{first}/10.0.0.1:{8000 if first == 'a' else 8001}"].backlog.add(
        80_000, 0.0, 8000.0
    )
    assert place(6, "s") != first


def test_a_pinned_route_keeps_the_session_whatever_it_costs() -> None:
    a, b = spec("a"), spec("b", port=8001)
    made = core([a, b], strategy="round-robin")
    pool = Pool("llama", models=("llama-3",), strategy="round-robin")
    route = Route("r", RouteMatch(), "llama", pin=True)
    made.install(Router({"llama": pool}, [route]), [a, b])
    places = {
        made.dispatcher.decide(request(f"r{number}", session="s"), 0.0).lease.endpoint.key  # type: ignore[union-attr]
        for number in range(5)
    }
    assert len(places) == 1
