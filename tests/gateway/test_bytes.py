"""What the engine receives is what the client sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from tests.gateway.echo_engine import running_engine
from tests.gateway.gateway_process import Gateway, cluster, running_gateway

ODD = (
    b'{ "seed":9007199254740993,\t"temperature":1e-7, "top_p":1.0,"model" : "m","z":1,"a":"caf\\u00e9 \\ud83d\\ude00",'
    b'\n "messages":[{"role":"user","content":[{"type":"zzz","x":{}},{"type":"text","text":"\\"model\\":\\"other\\""}]}]}'
)
MODEL_AT = ODD.index(b'"m"')


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[tuple[Gateway, object]]:
    async with running_engine("a") as engine:
        settings = {"pools": {"pool": {"aliases": {"alias": "m"}}}}
        async with running_gateway(tmp_path, [cluster("a", engine.address)], settings) as running:
            yield running, engine


async def test_odd_json_arrives_byte_for_byte_with_its_length(gateway) -> None:
    running, engine = gateway
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{running.url}/v1/chat/completions", data=ODD) as reply:
            assert reply.status == 200, await reply.text()
    (received,) = [item for item in engine.received if item.method == "POST"]
    assert received.body == ODD
    assert received.headers["content-length"] == str(len(ODD))
    assert "transfer-encoding" not in received.headers


async def test_an_alias_changes_the_model_and_nothing_else(gateway) -> None:
    running, engine = gateway
    sent = ODD[:MODEL_AT] + b'"alias"' + ODD[MODEL_AT + 3 :]
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{running.url}/v1/chat/completions", data=sent) as reply:
            assert reply.status == 200, await reply.text()
    (received,) = [item for item in engine.received if item.method == "POST"]
    assert received.body == ODD
    assert received.headers["content-length"] == str(len(ODD))
