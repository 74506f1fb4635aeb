"""LoRA adapters as engines tell of them."""

from __future__ import annotations

from extproc.admission.decision import Decision
from extproc.engines.state import EngineState
from extproc.fleet.adapters import Adapters, ServedModel
from extproc.fleet.endpoint import Endpoint
from extproc.fleet.fleet import Fleet
from extproc.routing.rejection import Rejection
from tests.unit.core_parts import core, request, spec

BASE = ServedModel("llama-3")


def test_a_model_with_a_parent_is_an_adapter_of_its_endpoints_pool() -> None:
    adapters = Adapters()
    adapters.told(Endpoint(spec("a"), 0), [BASE, ServedModel("sql", "llama-3")])
    assert adapters.pool_of == {"sql": "llama"}


def test_what_an_endpoint_no_longer_tells_is_forgotten_and_so_are_endpoints_that_left() -> None:
    adapters = Adapters()
    a, b = Endpoint(spec("a"), 0), Endpoint(spec("b"), 1)
    adapters.told(a, [BASE, ServedModel("sql", "llama-3"), ServedModel("law", "llama-3")])
    adapters.told(b, [BASE, ServedModel("sql", "llama-3")])
    adapters.told(a, [BASE, ServedModel("law", "llama-3")])
    assert set(adapters.pool_of) == {"sql", "law"}
    adapters.keep({b.key: b})
    assert set(adapters.pool_of) == {"sql"}


def test_names_are_bounded() -> None:
    adapters = Adapters()
    adapters.told(Endpoint(spec("a"), 0), [ServedModel(f"n{one}", "llama-3") for one in range(5000)])
    assert len(adapters.pool_of) == 1000


def test_running_adapters_are_served_where_the_metrics_show_them() -> None:
    fleet = Fleet()
    ((one,), _) = fleet.apply([spec("a")])
    fleet.scraped(one, EngineState(at=0.0, running_adapters=frozenset({"sql"}), max_lora=2), 0.0)
    assert fleet.adapters.pool_of == {"sql": "llama"}
    assert one.serves("sql")


def test_an_endpoint_that_told_its_models_is_not_asked_for_others() -> None:
    one = Endpoint(spec("a"), 0)
    one.served = frozenset({"llama-3", "sql"})
    assert one.serves("sql")
    assert not one.serves("law")


def test_a_request_for_an_adapter_goes_where_it_is_served_and_prefers_where_it_is_loaded() -> None:
    a, b, c = (spec(name, port=8000 + number) for number, name in enumerate("abc"))
    made = core([a, b, c], strategy="expected-latency")
    by_name = {one.spec.cluster: one for one in made.fleet.endpoints.values()}
    for name in "ab":
        made.fleet.adapters.told(by_name[name], [BASE, ServedModel("sql", "llama-3")])
    made.fleet.adapters.told(by_name["c"], [BASE])
    for name, running in (("a", {"law"}), ("b", {"sql"}), ("c", set[str]())):
        state = EngineState(at=0.0, running=1.0, running_adapters=frozenset(running), max_lora=1)
        made.fleet.scraped(by_name[name], state, 0.0)
    for number in range(4):
        decided = made.dispatcher.decide(request(f"r{number}", model="sql"), 0.0)
        assert isinstance(decided, Decision)
        assert decided.lease.endpoint.spec.cluster == "b"


def test_an_adapter_nobody_serves_is_an_unknown_model() -> None:
    made = core([spec("a")])
    assert isinstance(made.dispatcher.decide(request("r", model="sql"), 0.0), Rejection)


def test_a_restarted_engine_has_no_adapter_loaded() -> None:
    built = core([spec("a")])
    (endpoint,) = built.fleet.endpoints.values()
    endpoint.asked_for("sql")
    built.fleet.restarted(endpoint)
    assert not endpoint.adapters
