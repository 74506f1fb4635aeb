"""Where requests go: filters, versions, fallbacks, and the lease opened in the same step."""

from __future__ import annotations

from collections import Counter

from extproc.admission.dispatcher import Considered, Decision
from extproc.fleet.endpoint import Role
from extproc.routing.rejection import Rejection
from extproc.routing.route import Route, RouteMatch
from tests.unit.core_parts import core, end, request, spec


def chosen(decided: Decision | Rejection) -> str:
    assert isinstance(decided, Decision), decided
    return decided.choices[0].endpoint.spec.cluster


def test_least_requests_sees_the_decision_before() -> None:
    built = core([spec("a"), spec("b"), spec("c")])
    where = [chosen(built.dispatcher.decide(request(f"r{n}"), 0.0)) for n in range(9)]
    assert Counter(where) == {"a": 3, "b": 3, "c": 3}


def test_the_next_best_endpoints_are_the_fallbacks() -> None:
    built = core([spec("a"), spec("b"), spec("c")], fallbacks=2)
    decided = built.dispatcher.decide(request("r"), 0.0)
    assert isinstance(decided, Decision)
    assert len({choice.endpoint.key for choice in decided.choices}) == 3
    assert decided.lease.fallbacks == tuple(choice.endpoint for choice in decided.choices[1:])


def test_an_excluded_endpoint_gets_nothing_but_the_last_one_is_never_excluded() -> None:
    built = core([spec("a"), spec("b")])
    a, b = built.fleet.pool("llama")
    for _ in range(3):
        a.health.failed(0.0)
    assert {chosen(built.dispatcher.decide(request(f"r{n}"), 0.1)) for n in range(8)} == {"b"}
    for _ in range(3):
        b.health.failed(0.1)
    assert chosen(built.dispatcher.decide(request("r9"), 0.2)) in ("a", "b")


def test_draining_sleeping_and_prefill_only_endpoints_are_never_chosen() -> None:
    built = core([spec("a", draining=True), spec("b", role=Role.PREFILL), spec("c")])
    assert {chosen(built.dispatcher.decide(request(f"r{n}"), 0.0)) for n in range(6)} == {"c"}


def test_a_pool_without_usable_endpoints_is_a_503_that_says_why() -> None:
    built = core([spec("a", draining=True)])
    decided = built.dispatcher.decide(request("r"), 0.0)
    assert isinstance(decided, Rejection)
    assert (decided.status, decided.code, decided.retry_after_s) == (503, "no_capacity", 1.0)
    assert "draining" in decided.message


def test_a_full_endpoint_is_passed_over_while_another_has_room() -> None:
    built = core([spec("a", max_concurrency=1), spec("b")], strategy="round-robin")
    where = [chosen(built.dispatcher.decide(request(f"r{n}"), 0.0)) for n in range(6)]
    assert Counter(where)["a"] == 1


def test_an_unknown_model_is_a_404_that_names_the_models_here() -> None:
    decided = core([spec("a")]).dispatcher.decide(request("r", model="gpt-9"), 0.0)
    assert isinstance(decided, Rejection)
    assert (decided.status, decided.code) == (404, "model_not_found")
    assert "llama-3" in decided.message


WEIGHTED = Route("canary", RouteMatch(), "llama", weights={"v1": 90, "v2": 10})


def test_versions_share_by_weight_and_stick_to_a_session() -> None:
    built = core([spec("a", version="v1"), spec("b", version="v2")], routes=[WEIGHTED])
    count: Counter[str] = Counter()
    for n in range(2000):
        count[chosen(built.dispatcher.decide(request(f"r{n}"), 0.0))] += 1
        built.ledger.drop(f"r{n}", 0.0)
    assert 140 <= count["b"] <= 260
    where = set()
    for n in range(20):
        where.add(chosen(built.dispatcher.decide(request(f"s{n}", session="sticky"), 0.0)))
    assert len(where) == 1


def test_a_version_without_usable_endpoints_gives_its_share_to_the_others() -> None:
    built = core([spec("a", version="v1")], routes=[WEIGHTED])
    assert {chosen(built.dispatcher.decide(request(f"r{n}"), 0.0)) for n in range(50)} == {"a"}


def test_strategies_keep_their_state_over_a_reload_of_the_same_configuration() -> None:
    built = core([spec("a"), spec("b")], strategy="round-robin")
    first = chosen(built.dispatcher.decide(request("r1"), 0.0))
    built.dispatcher.install(built.dispatcher._router)
    assert chosen(built.dispatcher.decide(request("r2"), 0.0)) != first


def test_everything_considered_is_reported() -> None:
    seen: list[Considered] = []
    built = core([spec("a"), spec("b", draining=True)], on_considered=lambda item, now: seen.append(item))
    built.dispatcher.decide(request("r"), 0.0)
    (considered,) = seen
    assert [choice.endpoint.spec.cluster for choice in considered.ranked] == ["a"]
    assert [(endpoint.spec.cluster, word) for endpoint, word in considered.removed] == [("b", "draining")]
    assert considered.decision is not None


def test_usage_teaches_token_sizes() -> None:
    built = core([spec("a")])
    for n in range(64):
        decided = built.dispatcher.decide(request(f"r{n}", "x" * 2000), 0.0)
        assert isinstance(decided, Decision)
        size = decided.lease.prompt_bytes
        from extproc.outcome import Usage

        built.ledger.ended(end(f"r{n}", decided.lease.endpoint.spec, usage=Usage(size // 3, 40, 0)), 1.0)
    assert 2.9 < built.models.bytes_per_token("llama-3") < 3.15
    assert 30 < built.models.output_tokens("llama-3") < 60
