"""Who may ask: keys, allowed models, and what of the client's credentials reaches an engine."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Lab, chat, cluster, running_lab

ALPHA, BETA, GAMMA = "sk-alpha-1", "sk-beta-2", "sk-gamma-3"


def sha(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory) -> AsyncIterator[Lab]:
    directory: Path = tmp_path_factory.mktemp("tenants")
    (directory / "beta.keys").write_text(f"# of beta\n{BETA}\n")
    os.environ["EXTPROC_TEST_UPSTREAM"] = "engine-secret"
    settings = {
        "pools": {"small": {}, "locked": {"upstream_key": "env:EXTPROC_TEST_UPSTREAM"}},
        "tiers": {"gold": {"priority": 10}, "free": {"models": ["m-small"]}},
        "tenants": {
            "alpha": {"keys": [sha(ALPHA)], "tier": "gold"},
            "beta": {"keys": ["file:beta.keys"], "tier": "free"},
        },
    }
    async with running_lab(
        directory,
        ["small", "locked"],
        lambda engines: [
            cluster("small", engines["small"].address, pool="small", model="m-small"),
            cluster("locked", engines["locked"].address, pool="locked", model="m-locked"),
        ],
        settings,
    ) as running:
        yield running


import pytest  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")


def error(body: bytes) -> tuple[str, str]:
    found = json.loads(body)["error"]
    return found["type"], found["code"]


async def test_without_a_key_the_answer_is_a_401_in_the_clients_dialect(lab: Lab) -> None:
    status, headers, body = await lab.post(chat(model="m-small"))
    assert (status, error(body)) == (401, ("invalid_request_error", "invalid_api_key"))
    assert headers["www-authenticate"] == "Bearer"
    status, _, body = await lab.post(chat(model="m-small"), path="/v1/messages", x_api_key="sk-wrong")
    assert (status, json.loads(body)["error"]["type"]) == (401, "authentication_error")


async def test_a_key_in_either_header_is_taken_and_never_reaches_the_engine(lab: Lab) -> None:
    lab["small"].reset()
    assert (await lab.post(chat(model="m-small"), authorization=f"Bearer {ALPHA}"))[0] == 200
    assert (await lab.post(chat(model="m-small"), x_api_key=BETA))[0] == 200
    for received in lab["small"].posts:
        assert "authorization" not in received.headers
        assert "x-api-key" not in received.headers


async def test_engines_get_the_pools_own_key_in_place_of_the_clients(lab: Lab) -> None:
    lab["locked"].reset()
    assert (await lab.post(chat(model="m-locked"), authorization=f"Bearer {ALPHA}"))[0] == 200
    assert lab["locked"].posts[0].headers["authorization"] == "Bearer engine-secret"


async def test_a_model_that_the_tenant_may_not_use_is_a_403(lab: Lab) -> None:
    status, _, body = await lab.post(chat(model="m-locked"), authorization=f"Bearer {BETA}")
    assert (status, error(body)) == (403, ("invalid_request_error", "model_not_allowed"))


async def test_the_list_of_models_is_the_tenants_own(lab: Lab) -> None:
    async def models(key: str) -> list[str]:
        async with lab.session.get(
            f"{lab.url}/v1/models", headers={"authorization": f"Bearer {key}"}
        ) as reply:
            assert reply.status == 200
            return [model["id"] for model in (await reply.json())["data"]]

    assert await models(ALPHA) == ["m-small", "m-locked"]
    assert await models(BETA) == ["m-small"]
    async with lab.session.get(f"{lab.url}/v1/models") as reply:
        assert reply.status == 401
    async with lab.session.get(f"{lab.url}/v1/models/m-locked", headers={"x-api-key": BETA}) as reply:
        assert reply.status == 404


async def test_health_needs_no_key(lab: Lab) -> None:
    async with lab.session.get(f"{lab.url}/health") as reply:
        assert reply.status == 200


async def test_a_header_that_clients_can_send_makes_nobody_a_tenant(lab: Lab) -> None:
    forged = {"x_gateway_client": "alpha", "x_forwarded_client_cert": "Subject=alpha", "x_tenant": "alpha"}
    assert (await lab.post(chat(model="m-small"), **forged))[0] == 401


async def test_keys_in_a_file_are_taken_over_while_running(lab: Lab) -> None:
    assert (await lab.post(chat(model="m-small"), x_api_key=GAMMA))[0] == 401
    (lab.gateway.directory / "beta.keys").write_text(f"{GAMMA}\n")

    async def taken() -> bool:
        return (await lab.post(chat(model="m-small"), x_api_key=GAMMA))[0] == 200

    await until(taken, 15, "the new key is known")
    assert (await lab.post(chat(model="m-small"), x_api_key=BETA))[0] == 401


async def test_keys_are_in_no_log(lab: Lab) -> None:
    await lab.post(chat(model="m-small"), authorization="Bearer sk-never-seen")
    for text in (lab.extproc.log, lab.gateway.envoy.log, json.dumps(await lab.extproc.get("/config"))):
        assert not any(key in text for key in (ALPHA, BETA, GAMMA, "sk-never-seen", "engine-secret"))
