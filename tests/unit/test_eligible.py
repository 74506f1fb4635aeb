"""Which endpoints of a pool may take a request: what is left out, how many at most, and what is waived."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from extproc.engines.state import EngineState
from extproc.fleet.endpoint import Endpoint, EndpointSpec, Lifecycle
from extproc.fleet.health import HealthPolicy
from extproc.scheduling.eligible import eligible


def pool(count: int, **more: object) -> list[Endpoint]:
    return [
        Endpoint(EndpointSpec(f"e{n}", "10.0.0.1:8000", "pool", **more), n)  # type: ignore[arg-type]
        for n in range(count)
    ]


def names(endpoints: Sequence[Endpoint]) -> list[str]:
    return [endpoint.spec.cluster for endpoint in endpoints]


def fail(endpoint: Endpoint, now: float = 0.0, times: int = 3, **how: bool) -> None:
    for _ in range(times):
        endpoint.health.failed(now, **how)


def test_failing_endpoints_are_left_out() -> None:
    endpoints = pool(4)
    fail(endpoints[1])
    usable, removed = eligible(endpoints, 0.1)
    assert names(usable) == ["e0", "e2", "e3"]
    assert [(e.spec.cluster, word) for e, word in removed] == [("e1", "excluded")]


def test_for_errors_at_most_half_of_a_pool_is_left_out_the_soonest_back_stays() -> None:
    endpoints = pool(4)
    for place, now in ((2, 0.0), (0, 0.1), (1, 0.2)):
        fail(endpoints[place], now)
    assert names(eligible(endpoints, 0.3)[0]) == ["e2", "e3"]


def test_the_share_is_configured() -> None:
    endpoints = pool(4)
    for endpoint in endpoints[:3]:
        fail(endpoint)
    assert len(eligible(endpoints, 0.1, policy=HealthPolicy(max_ejection=0.8))[0]) == 1
    assert len(eligible(endpoints, 0.1, policy=HealthPolicy(max_ejection=0.0))[0]) == 4


def test_endpoints_that_refuse_connections_are_left_out_however_many() -> None:
    endpoints = pool(4)
    for endpoint in endpoints[:3]:
        fail(endpoint, connect=True)
    assert names(eligible(endpoints, 0.1)[0]) == ["e3"]


def test_the_last_one_is_never_left_out() -> None:
    for how in ({}, {"connect": True}, {"unreachable": True}):
        for count in (1, 2, 3):
            endpoints = pool(count)
            for endpoint in endpoints:
                fail(endpoint, **how)
            assert eligible(endpoints, 0.1)[0]


def test_busy_endpoints_rest_while_others_can_serve() -> None:
    endpoints = pool(2)
    endpoints[0].health.busied(0.0)
    endpoints[0].health.busied(0.0)
    assert names(eligible(endpoints, 0.1)[0]) == ["e1"]
    endpoints[1].health.busied(0.1)
    endpoints[1].health.busied(0.1)
    assert eligible(endpoints, 0.2)[0]


def test_a_version_whose_endpoints_are_left_out_gives_its_requests_to_the_others() -> None:
    endpoints = [*pool(2, version="v1"), *pool(1, version="v2")]
    assert len(eligible(endpoints, 0.0, version="v2")[0]) == 1
    fail(endpoints[2], connect=True)
    assert names(eligible(endpoints, 0.1, version="v2")[0]) == ["e0", "e1"]


def test_draining_ones_get_nothing_even_when_they_are_the_last() -> None:
    endpoints = pool(1)
    endpoints[0].lifecycle = Lifecycle.DRAINING
    assert eligible(endpoints, 0.0)[0] == []


def test_warming_ones_get_requests_only_when_there_is_no_other() -> None:
    endpoints = pool(2)
    endpoints[1].lifecycle = Lifecycle.WARMING
    usable, removed = eligible(endpoints, 0.0)
    assert names(usable) == ["e0"]
    assert [word for _, word in removed] == ["warming"]
    endpoints[0].lifecycle = Lifecycle.DRAINING
    assert names(eligible(endpoints, 0.0)[0]) == ["e1"]


def test_an_engine_whose_queue_is_at_nine_tenths_of_its_capacity_is_passed_over() -> None:
    endpoints = pool(2, max_concurrency=100)
    endpoints[0].observe(EngineState(at=0.0, waiting=91.0), None, 0.0)
    endpoints[1].observe(EngineState(at=0.0, waiting=90.0), None, 0.0)
    usable, removed = eligible(endpoints, 0.5)
    assert names(usable) == ["e1"]
    assert [word for _, word in removed] == ["saturated"]


def test_an_old_queue_says_nothing() -> None:
    endpoints = pool(2, max_concurrency=100)
    endpoints[0].observe(EngineState(at=0.0, waiting=91.0), None, 0.0)
    assert len(eligible(endpoints, 60.0)[0]) == 2


KINDS = st.sampled_from(["well", "errors", "connect", "refused", "busy", "draining", "warming"])


@given(st.lists(KINDS, min_size=1, max_size=12), st.floats(0, 1))
def test_someone_serves_and_no_more_than_the_share_is_left_out_for_errors(
    kinds: list[str], share: float
) -> None:
    endpoints = pool(len(kinds))
    for endpoint, kind in zip(endpoints, kinds, strict=True):
        if kind == "errors":
            fail(endpoint)
        elif kind == "connect":
            fail(endpoint, connect=True)
        elif kind == "refused":
            fail(endpoint, unreachable=True)
        elif kind == "busy":
            endpoint.health.busied(0.0)
            endpoint.health.busied(0.0)
        elif kind != "well":
            endpoint.lifecycle = Lifecycle(kind)
    usable, removed = eligible(endpoints, 0.1, policy=HealthPolicy(max_ejection=share))
    assert sorted(names(usable) + names([e for e, _ in removed])) == sorted(names(endpoints))
    assert bool(usable) == any(kind != "draining" for kind in kinds)
    considered = sum(kind not in ("draining", "warming") for kind in kinds)
    opinion = [e for e, word in removed if word == "excluded" and not e.health.evident(0.1)]
    assert len(opinion) <= considered * share + 1e-6
