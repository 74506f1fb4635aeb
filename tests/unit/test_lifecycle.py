"""Warming, ready, draining, gone: what the fleet makes of declarations, drains by hand and probes."""

from __future__ import annotations

from dataclasses import replace

from extproc.engines.state import EngineState
from extproc.fleet.endpoint import EndpointSpec, Lifecycle
from extproc.fleet.fleet import Fleet
from extproc.fleet.health import Circuit, HealthPolicy

A = EndpointSpec("a", "10.0.0.1:8000", "pool")
B = EndpointSpec("b", "10.0.0.2:8000", "pool")
C = EndpointSpec("c", "10.0.0.3:8000", "other")


def probed(*specs: EndpointSpec) -> Fleet:
    fleet = Fleet()
    fleet.probed = True
    fleet.apply(specs)
    return fleet


def lives(fleet: Fleet) -> dict[str, str]:
    return {endpoint.spec.cluster: endpoint.lifecycle.value for endpoint in fleet.endpoints.values()}


def test_the_first_endpoints_of_a_pool_are_ready_at_once() -> None:
    assert lives(probed(A, B)) == {"a": "ready", "b": "ready"}


def test_one_that_joins_ready_ones_warms_up_until_it_has_shown_itself() -> None:
    fleet = probed(A)
    fleet.apply([A, B])
    assert lives(fleet) == {"a": "ready", "b": "warming"}
    fleet.ready(fleet.endpoints[B.key])
    assert lives(fleet)["b"] == "ready"


def test_one_that_joins_another_pool_does_not() -> None:
    fleet = probed(A)
    fleet.apply([A, C])
    assert lives(fleet)["c"] == "ready"


def test_without_a_prober_nobody_warms_up() -> None:
    fleet = Fleet()
    fleet.apply([A])
    fleet.apply([A, B])
    assert lives(fleet)["b"] == "ready"


def test_a_reload_leaves_a_warming_endpoint_warming() -> None:
    fleet = probed(A)
    fleet.apply([A, B])
    fleet.apply([A, replace(B, weight=2.0)])
    assert lives(fleet)["b"] == "warming"


def test_drain_and_undrain_by_the_file() -> None:
    fleet = probed(A, B)
    fleet.apply([replace(A, draining=True), B])
    assert lives(fleet)["a"] == "draining"
    fleet.apply([A, B])
    assert lives(fleet)["a"] == "warming"


def test_a_drain_by_hand_outlives_reloads() -> None:
    fleet = probed(A, B)
    fleet.drain(fleet.endpoints[A.key])
    fleet.apply([A, B])
    assert lives(fleet)["a"] == "draining"
    fleet.undrain(fleet.endpoints[A.key])
    assert lives(fleet)["a"] == "warming"


def test_the_only_endpoint_is_ready_as_soon_as_it_is_undrained() -> None:
    fleet = probed(A)
    fleet.drain(fleet.endpoints[A.key])
    fleet.undrain(fleet.endpoints[A.key])
    assert lives(fleet)["a"] == "ready"


def test_undrain_does_not_overrule_the_file() -> None:
    fleet = probed(replace(A, draining=True), B)
    fleet.undrain(fleet.endpoints[A.key])
    assert lives(fleet)["a"] == "draining"


def test_a_drained_endpoint_is_not_made_ready_by_a_late_probe() -> None:
    fleet = probed(A)
    fleet.apply([A, B])
    b = fleet.endpoints[B.key]
    fleet.drain(b)
    fleet.ready(b)
    assert b.lifecycle is Lifecycle.DRAINING


def test_new_bounds_of_health_reach_every_endpoint() -> None:
    fleet = probed(A)
    fleet.rule(HealthPolicy(failures=1))
    fleet.apply([A, B])
    for endpoint in fleet.endpoints.values():
        endpoint.health.failed(0.0)
        assert endpoint.health.state(0.0) is Circuit.OPEN


def test_a_restart_of_the_engine_is_noticed_and_tried_gently() -> None:
    fleet = probed(A)
    a = fleet.endpoints[A.key]
    fleet.scraped(a, EngineState(at=0.0, generation_tokens_total=1000.0), 0.0)
    for _ in range(3):
        a.health.failed(0.0)
    fleet.scraped(a, EngineState(at=0.5, generation_tokens_total=3.0), 0.5)
    assert a.generation == 1
    assert a.health.state(0.5) is Circuit.HALF_OPEN


def test_scrapes_that_time_out_on_the_engines_port_are_silence_others_are_not() -> None:
    fleet = probed(A, B)
    a, b = fleet.endpoints[A.key], fleet.endpoints[B.key]
    for second in range(10):
        fleet.scrape_failed(a, float(second), timed_out=True)
        fleet.scrape_failed(b, float(second))
    assert a.health.state(9.0) is Circuit.OPEN
    assert b.health.state(9.0) is Circuit.CLOSED
