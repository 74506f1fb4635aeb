"""GET /v1/models: which names a tenant is told of."""

from __future__ import annotations

import json

from extproc.api.request import RequestHead
from extproc.config import traffic
from extproc.config.schema import Settings
from extproc.edge.own_answers import OwnAnswers

NAMES = [
    ("big", "p"),
    ("small", "p"),
    ("gpt-4o", "p"),
    ("gpt-4o-mini", "p"),
    ("either", "p"),
    ("routed", "p"),
]


def settings(**tenant: object) -> Settings:
    return Settings.model_validate(
        {
            "pools": {
                "p": {"aliases": {"gpt-4o": "big", "gpt-4o-mini": "small", "either": "small"}},
                "q": {"aliases": {"either": "big"}},
            },
            "routes": [{"name": "r", "match": {"model": ["routed"]}, "pool": "p", "model": "small"}],
            "tenants": {"t": {"keys": ["env:KEY"], **tenant}},
        }
    )


def asked(path: str, **tenant: object) -> tuple[int, object]:
    answers = OwnAnswers(lambda: NAMES, lambda: (True, ""))
    who = traffic.tenants(settings(**tenant))["t"]
    reply = answers.reply(RequestHead("test", "GET", path, "", {}), who)
    assert reply is not None
    return reply.immediate_response.status.code, json.loads(reply.immediate_response.body)


def listed(**tenant: object) -> list[str]:
    code, body = asked("/v1/models", **tenant)
    assert code == 200
    return [model["id"] for model in body["data"]]  # type: ignore[index]


def test_without_restriction_all_names_are_listed() -> None:
    assert listed() == [name for name, _ in NAMES]


def test_a_restricted_tenant_is_told_the_names_that_stand_for_its_models() -> None:
    """`either` is another model in another pool: it is not promised."""
    assert listed(models=["small"]) == ["small", "gpt-4o-mini", "routed"]


def test_an_alias_alone_does_not_show_what_it_stands_for() -> None:
    assert listed(models=["gpt-4o"]) == ["gpt-4o"]


def test_the_404_names_the_same_models() -> None:
    code, body = asked("/v1/models/big", models=["small"])
    assert code == 404
    assert "Models here: small, gpt-4o-mini, routed." in str(body)


def test_a_name_that_stands_for_an_allowed_model_is_found() -> None:
    assert asked("/v1/models/gpt-4o-mini", models=["small"])[0] == 200
