"""What a client that is refused can tell its operator, and what the operator then finds."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp

from tests.gateway.echo_engine import running_engine
from tests.gateway.gateway_process import cluster, running_gateway


async def test_a_refusal_carries_the_id_and_its_record_says_who(tmp_path: Path) -> None:
    settings = {
        "responses": {"headers": True},
        "tenants": {"hobby": {"keys": ["env:HOBBY_KEY"], "limits": {"rpm": 1}}},
    }
    key = {"authorization": "Bearer s3cret-for-tests"}
    (tmp_path / "key").write_text("s3cret-for-tests")
    settings["tenants"]["hobby"]["keys"] = [f"file:{tmp_path / 'key'}"]  # type: ignore[index]
    async with (
        running_engine("a") as engine,
        running_gateway(tmp_path, [cluster("a", engine.address)], settings) as running,
        aiohttp.ClientSession(running.url) as session,
    ):
        ids = []
        for headers, model, status in (
            ({}, "m", 401),
            (key, "nobody", 404),
            (key, "m", 200),
            (key, "m", 429),
        ):
            body = json.dumps({"model": model, "messages": []})
            async with session.post("/v1/chat/completions", data=body, headers=headers) as reply:
                assert reply.status == status, await reply.text()
                ids.append(reply.headers["x-gateway-request-id"])
        found = [await running.extproc.get(f"/decisions/{request_id}") for request_id in ids]
    assert [record["tenant"] for record in found] == ["", "hobby", "hobby", "hobby"]
    assert found[3]["rejection"]["status"] == 429
