"""Rejections in the client's dialect, and the model list."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.api import models
from extproc.api.errors import anthropic_type, render
from extproc.api.request import Dialect
from extproc.routing.rejection import Rejection, bad_request, internal, model_not_found, no_capacity


def shown(rejection: Rejection, dialect: Dialect = Dialect.OPENAI) -> tuple[Any, dict[str, str]]:
    body, headers = render(rejection, dialect)
    return json.loads(body), dict(headers)


def test_openais_shape() -> None:
    body, headers = shown(model_not_found("x", ["a", "b"]))
    assert body == {
        "error": {
            "message": "The model `x` does not exist here. Models here: a, b.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    assert headers == {"content-type": "application/json"}


def test_anthropics_shape() -> None:
    body, _ = shown(model_not_found("x", []), Dialect.ANTHROPIC)
    message = "The model `x` does not exist here. No models are configured."
    assert body == {"type": "error", "error": {"type": "not_found_error", "message": message}}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_anthropics_types_by_status(status: int, kind: str) -> None:
    assert anthropic_type(status) == kind


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, "0"), (0.2, "1"), (1.0, "1"), (2.01, "3"), (-5.0, "0")]
)
def test_retry_after_is_whole_seconds_rounded_up(seconds: float, header: str) -> None:
    for dialect in Dialect:
        assert shown(no_capacity("p", "down", retry_after_s=seconds), dialect)[1]["retry-after"] == header


def test_no_retry_after_where_a_retry_is_pointless() -> None:
    assert "retry-after" not in shown(bad_request("no"))[1]


def test_a_rejections_own_headers_follow() -> None:
    rejection = Rejection(
        429, "rate_limit", "c", "m", "r", headers=(("x-ratelimit-remaining-requests", "0"),)
    )
    assert render(rejection, Dialect.OPENAI)[1][1:] == [("x-ratelimit-remaining-requests", "0")]


def test_any_message_can_be_sent() -> None:
    message = 'quote " newline \n lone \ud800 ö'
    body, _ = render(bad_request(message), Dialect.OPENAI)
    assert json.loads(body)["error"]["message"] == message
    body.decode("ascii")


def test_a_fault_of_ours_is_an_error_in_shape_too() -> None:
    assert shown(internal())[0]["error"]["code"] == "internal_error"


MODELS = [("org/a", "pool-1"), ("b", "pool-2")]


def test_openais_model_list() -> None:
    assert json.loads(models.listing(MODELS, 7)) == {
        "object": "list",
        "data": [
            {"id": "org/a", "object": "model", "created": 7, "owned_by": "pool-1"},
            {"id": "b", "object": "model", "created": 7, "owned_by": "pool-2"},
        ],
    }
    assert json.loads(models.single("b", "o", 7)) == {
        "id": "b",
        "object": "model",
        "created": 7,
        "owned_by": "o",
    }


def test_anthropics_model_list() -> None:
    page = json.loads(models.anthropic_listing(MODELS, 1_700_000_000))
    assert page["data"][0] == {
        "type": "model",
        "id": "org/a",
        "display_name": "org/a",
        "created_at": "2023-11-14T22:13:20Z",
    }
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "org/a", "b")
    assert json.loads(models.anthropic_single("org/a", 1_700_000_000)) == page["data"][0]


def test_an_empty_list() -> None:
    assert json.loads(models.listing([], 0)) == {"object": "list", "data": []}
    empty = {"data": [], "has_more": False, "first_id": None, "last_id": None}
    assert json.loads(models.anthropic_listing([], 0)) == empty


def test_which_list() -> None:
    assert models.wants_anthropic({"anthropic-version": "2023-06-01"})
    assert not models.wants_anthropic({"authorization": "Bearer x"})
