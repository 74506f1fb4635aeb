"""Which pool answers a request, and what becomes of its model name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.api.request import Api, InferenceRequest, RequestHead
from extproc.routing.match import Match, Router
from extproc.routing.pool import Pool
from extproc.routing.rejection import Rejection
from extproc.routing.route import Route, RouteMatch
from extproc.routing.tenant import ANONYMOUS, Tenant

LLAMA = Pool(
    "llama",
    models=("llama-3-8b", "gpt-oss:120b"),
    aliases={"gpt-4o-mini": "llama-3-8b", "bot": "legal-lora"},
    adapters=("legal-lora",),
)
QWEN = Pool("qwen", models=("org/qwen@v1",))
POOLS = {"llama": LLAMA, "qwen": QWEN}


def asking(
    model: str | None = None,
    api: Api = Api.CHAT,
    path: str = "/v1/chat/completions",
    **headers: str,
) -> InferenceRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return InferenceRequest(RequestHead("1", "POST", path, "", named), api=api, model=model)


def found(answer: Match | Rejection) -> tuple[str, str, str | None, str | None]:
    assert isinstance(answer, Match), answer
    return answer.pool.name, answer.route.name, answer.splice, answer.adapter


def refused(answer: Match | Rejection) -> Rejection:
    assert isinstance(answer, Rejection), answer
    return answer


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama-3-8b", ("llama", "llama", None, None)),
        ("gpt-oss:120b", ("llama", "llama", None, None)),
        ("org/qwen@v1", ("qwen", "qwen", None, None)),
        ("gpt-4o-mini", ("llama", "llama", "llama-3-8b", None)),
        ("legal-lora", ("llama", "llama", None, "legal-lora")),
        ("bot", ("llama", "llama", "legal-lora", "legal-lora")),
    ],
)
def test_a_model_name_finds_its_pool(model: str, expected: tuple[str, str, str | None, str | None]) -> None:
    assert found(Router(POOLS).match(asking(model), ANONYMOUS)) == expected


def test_adapters_learnt_from_the_engines_find_their_pool() -> None:
    learnt = {"new-lora": "qwen", "llama-3-8b": "qwen", "lost": "gone"}
    router = Router(POOLS)
    assert found(router.match(asking("new-lora"), ANONYMOUS, learnt)) == ("qwen", "qwen", None, "new-lora")
    assert found(router.match(asking("llama-3-8b"), ANONYMOUS, learnt)) == ("llama", "llama", None, None)
    assert refused(router.match(asking("lost"), ANONYMOUS, learnt)).status == 404


def test_an_alias_may_stand_for_a_learnt_adapter() -> None:
    router = Router({"p": Pool("p", models=("m",), aliases={"bot": "lora"})})
    assert found(router.match(asking("bot"), ANONYMOUS, {"lora": "p"})) == ("p", "p", "lora", "lora")


@pytest.mark.parametrize("model", ["gpt-oss", "120b", "qwen", "LLAMA-3-8B", ""])
def test_model_names_are_never_taken_apart(model: str) -> None:
    answer = refused(Router(POOLS).match(asking(model), ANONYMOUS))
    assert (answer.status, answer.code, answer.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("api", [Api.CHAT, Api.EMBEDDINGS, Api.OTHER])
def test_an_unknown_model_is_a_404_whatever_the_path_and_default(api: Api) -> None:
    answer = refused(Router(POOLS, default_pool="llama").match(asking("nope", api), ANONYMOUS))
    assert answer.message == (
        "The model `nope` does not exist here. Models here: bot, gpt-4o-mini, gpt-oss:120b, legal-lora, "
        "llama-3-8b, "
        "org/qwen@v1."
    )


def test_a_404_names_only_models_the_tenant_may_use() -> None:
    tenant = Tenant("t", models=frozenset({"llama-3-8b"}))
    message = refused(Router(POOLS).match(asking("nope"), tenant)).message
    assert message == "The model `nope` does not exist here. Models here: llama-3-8b."


def test_without_a_model_the_default_pool_answers() -> None:
    assert found(Router(POOLS, default_pool="qwen").match(asking(), ANONYMOUS)) == (
        "qwen",
        "qwen",
        None,
        None,
    )
    assert found(Router({"qwen": QWEN}).match(asking(), ANONYMOUS)) == ("qwen", "qwen", None, None)


def test_without_a_model_and_a_default_pool_the_refusal_says_why() -> None:
    answer = refused(Router(POOLS).match(asking(), ANONYMOUS))
    assert (answer.status, answer.param, answer.message) == (
        400,
        "model",
        "The request names no model and the gateway has no default pool. Set `model` in the request body.",
    )
    assert refused(Router(POOLS).match(asking(None, Api.OTHER), ANONYMOUS)).status == 404
    assert refused(Router({}).match(asking(), ANONYMOUS)).status == 400


def test_a_pool_of_unknown_models_takes_any_name_as_the_default_pool() -> None:
    router = Router({"any": Pool("any"), "qwen": QWEN}, default_pool="any")
    assert found(router.match(asking("whatever"), ANONYMOUS)) == ("any", "any", None, None)
    assert found(router.match(asking("org/qwen@v1"), ANONYMOUS)) == ("qwen", "qwen", None, None)


def test_the_first_route_that_matches_rules() -> None:
    routes = [
        Route("free", RouteMatch(headers={"x-tier": "free"}), "llama"),
        Route("v1", RouteMatch(models=frozenset({"llama-3-8b", "org/qwen@v1"}), path_prefix="/v1"), "llama"),
        Route("rest", RouteMatch(), "qwen"),
    ]
    router = Router(POOLS, routes)
    assert found(router.match(asking("gpt-4o-mini", x_tier="free"), ANONYMOUS))[1:3] == ("free", "llama-3-8b")
    assert found(router.match(asking("llama-3-8b", x_tier="paid"), ANONYMOUS))[1] == "v1"
    assert found(router.match(asking(path="/other"), ANONYMOUS))[:2] == ("qwen", "rest")


def test_a_route_whose_pool_does_not_serve_the_model_refuses_it() -> None:
    router = Router(POOLS, [Route("free", RouteMatch(headers={"x-tier": "free"}), "qwen")])
    answer = refused(router.match(asking("llama-3-8b", x_tier="free"), ANONYMOUS))
    assert answer.message == "The model `llama-3-8b` does not exist here. Models here: org/qwen@v1."


@pytest.mark.parametrize(
    ("put_in", "splice", "adapter"),
    [
        ("org/qwen@v1", "org/qwen@v1", None),
        ("lora", "lora", "lora"),
        ("not-known-yet", "not-known-yet", None),
        ("short", "org/qwen@v1", None),
    ],
)
def test_a_route_may_put_in_a_model(put_in: str, splice: str, adapter: str | None) -> None:
    pool = Pool("qwen", models=QWEN.models, adapters=("lora",), aliases={"short": "org/qwen@v1"})
    route = Route("r", RouteMatch(models=frozenset({"gpt-4o"})), "qwen", model=put_in)
    answer = Router({"qwen": pool}, [route]).match(asking("gpt-4o"), ANONYMOUS)
    assert found(answer) == ("qwen", "r", splice, adapter)


def test_nothing_is_put_in_where_the_client_named_that_model_or_none() -> None:
    router = Router(POOLS, [Route("r", RouteMatch(), "qwen", model="org/qwen@v1")])
    assert found(router.match(asking("org/qwen@v1"), ANONYMOUS))[2] is None
    assert found(router.match(asking(), ANONYMOUS))[2] is None


def test_a_tenants_route_comes_after_declared_matches_and_before_the_models_pool() -> None:
    routes = [
        Route("vip", RouteMatch(headers={"x-vip": "1"}), "llama"),
        Route("own", RouteMatch(headers={"x-never": "1"}), "llama", strategy="round-robin"),
    ]
    router, tenant = Router(POOLS, routes), Tenant("t", route="own")
    assert found(router.match(asking("llama-3-8b", x_vip="1"), tenant))[1] == "vip"
    assert found(router.match(asking("llama-3-8b"), tenant))[1] == "own"
    assert found(router.match(asking(), tenant))[1] == "own"
    assert found(router.match(asking("org/qwen@v1"), tenant))[1] == "qwen"
    assert found(router.match(asking("llama-3-8b"), Tenant("t", route="gone")))[1] == "llama"


def test_where_two_pools_serve_a_model_the_default_pool_answers() -> None:
    pools = {"a": Pool("a", models=("m",)), "b": Pool("b", models=("m",))}
    assert found(Router(pools, default_pool="b").match(asking("m"), ANONYMOUS))[0] == "b"


names = st.sampled_from(["a", "b", "c", "x/y", "x:y"])
pools = st.dictionaries(
    st.sampled_from(["p", "q", "r"]),
    st.tuples(
        st.lists(names, max_size=2), st.dictionaries(names, names, max_size=2), st.lists(names, max_size=1)
    ),
)


@given(pools, st.one_of(st.none(), names), st.dictionaries(names, st.sampled_from(["p", "q", "gone"])))
def test_a_match_is_always_for_a_name_its_pool_knows(
    drawn: dict[str, tuple[list[str], dict[str, str], list[str]]], model: str | None, learnt: dict[str, str]
) -> None:
    built = {
        name: Pool(name, tuple(models), aliases, tuple(adapters))
        for name, (models, aliases, adapters) in drawn.items()
    }
    answer = Router(built).match(asking(model), ANONYMOUS, learnt)
    if isinstance(answer, Rejection):
        assert answer.status in (400, 404)
        return
    pool = answer.pool
    if model is not None:
        known = {*pool.models, *pool.aliases, *pool.adapters}
        assert model in known or learnt.get(model) == pool.name or not pool.models
        assert answer.splice in (None, pool.aliases.get(model))
    else:
        assert answer.splice is None


def test_a_route_by_model_also_rules_the_aliases_of_that_model() -> None:
    pool = Pool("llama", models=("llama-3",), aliases={"gpt-4o-mini": "llama-3"})
    free = Route("free", RouteMatch(models=frozenset({"llama-3"})), "llama")
    router = Router({"llama": pool}, (free,))
    match = router.match(asking("gpt-4o-mini"), ANONYMOUS)
    assert isinstance(match, Match)
    assert (match.route.name, match.splice) == ("free", "llama-3")
