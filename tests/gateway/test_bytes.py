"""What the engine receives is what the client sent, on every attempt."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import brotli
import pytest
import pytest_asyncio
import zstandard

from tests.gateway.echo_engine import EchoEngine
from tests.gateway.envoy_process import free_port
from tests.gateway.gateway_process import Lab, chat, cluster, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

ODD = (
    b'{ "seed":9007199254740993,\t"temperature":1e-7, "top_p":1.0,"model" : "m","z":1,'
    b'"a":"caf\\u00e9 \\ud83d\\ude00",\n "messages":[{"role":"user","content":[{"type":"zzz","x":{}},'
    b'{"type":"text","text":"\\"model\\":\\"other\\""}]}]}'
)
ALIASED = ODD.replace(b'"model" : "m"', b'"model" : "alias"')
FRAIL = ODD.replace(b'"model" : "m"', b'"model" : "frail"')

ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
}


def clusters(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
    return [
        cluster("a", engines["a"].address),
        cluster("b", engines["b"].address),
        cluster("dead", f"127.0.0.1:{free_port()}", pool="frail", model="frail"),
        cluster("alive", engines["a"].address, pool="frail", model="frail"),
    ]


SETTINGS = {
    "default_pool": "pool",
    "pools": {
        "pool": {"aliases": {"alias": "m"}, "strategy": "round-robin"},
        "frail": {"aliases": {"frail-alias": "frail"}, "strategy": "round-robin"},
    },
    # The dead one stays the first choice of every second request, and the busy one hardly rests.
    "health": {"failures": 10_000, "busy_backoff": 0.01, "max_busy_backoff": 0.01},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    directory: Path = tmp_path_factory.mktemp("bytes")
    async with running_lab(directory, ("a", "b"), clusters, SETTINGS) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def lab(module_lab: Lab) -> Lab:
    await module_lab.settled()
    return module_lab


def posts(lab: Lab) -> list[Any]:
    return [item for engine in lab.engines.values() for item in engine.posts]


async def test_odd_json_arrives_byte_for_byte_with_its_length(lab: Lab) -> None:
    status, _, reply = await lab.post(ODD)
    assert status == 200, reply
    (received,) = posts(lab)
    assert received.body == ODD
    assert received.headers["content-length"] == str(len(ODD))
    assert "transfer-encoding" not in received.headers


async def test_an_alias_changes_the_model_and_nothing_else(lab: Lab) -> None:
    assert (await lab.post(ALIASED))[0] == 200
    (received,) = posts(lab)
    assert received.body == ODD
    assert received.headers["content-length"] == str(len(ODD))


BODIES = {
    "content is a list": b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"hi"},'
    b'{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]}',
    "unknown content parts": b'{"model":"m","messages":[{"role":"user","content":[{"type":"audio_url",'
    b'"audio_url":{"url":"x"}},{"type":"zzz"}]}]}',
    "tool call turn with null content": b'{"model":"m","messages":[{"role":"user","content":"q"},'
    b'{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]},'
    b'{"role":"tool","tool_call_id":"1","content":"4"}]}',
    "content absent and empty": b'{"model":"m","messages":[{"role":"assistant"},{"content":""}]}',
    "duplicate keys": b'{"model":"zzz","model":"m","n":1,"n":2,"messages":[]}',
    "lone surrogate": b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
    "not a number": b'{"model":"m","temperature":NaN,"messages":[]}',
    "byte order mark": b'\xef\xbb\xbf{"model":"m","messages":[]}',
    "types nobody expects": b'{"model":"m","messages":"text","max_tokens":"ten","stream":"yes"}',
    "deep nesting": b'{"model":"m","x":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "unknown top-level values": b'{"model":"m","messages":[],"guided_json":{"b":1,"a":2}}',
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_that_an_engine_may_accept_is_no_error_of_ours(lab: Lab, name: str) -> None:
    status, _, reply = await lab.post(BODIES[name])
    assert status == 200, reply
    (received,) = posts(lab)
    assert received.body == BODIES[name]


@pytest.mark.parametrize("encoding", ENCODERS)
async def test_compressed_bodies_are_routed_by_what_is_in_them_and_sent_as_they_came(
    lab: Lab, encoding: str
) -> None:
    body = ENCODERS[encoding](ODD)
    status, _, reply = await lab.post(body, content_encoding=encoding)
    assert status == 200, reply
    (received,) = posts(lab)
    assert received.body == body
    assert received.headers["content-encoding"] == encoding
    assert received.headers["content-length"] == str(len(body))
    unknown = ENCODERS[encoding](chat(model="nobody-serves-this"))
    assert (await lab.post(unknown, content_encoding=encoding))[0] == 404


@pytest.mark.parametrize("encoding", ENCODERS)
async def test_an_alias_in_a_compressed_body_is_sent_plain(lab: Lab, encoding: str) -> None:
    status, _, reply = await lab.post(ENCODERS[encoding](ALIASED), content_encoding=encoding)
    assert status == 200, reply
    (received,) = posts(lab)
    assert received.body == ODD
    assert "content-encoding" not in received.headers
    assert received.headers["content-length"] == str(len(ODD))


async def test_a_body_of_an_encoding_nobody_knows_is_left_to_the_engine(lab: Lab) -> None:
    assert (await lab.post(b"\x00\x01\x02", content_encoding="snappy"))[0] == 200
    (received,) = posts(lab)
    assert (received.body, received.headers["content-encoding"]) == (b"\x00\x01\x02", "snappy")


async def met_by_a_503(lab: Lab, body: bytes, **headers: str) -> None:
    """Send the body until an attempt of one request has met a busy replica; every request is served by the other."""
    lab["a"].status = 503
    sent = 0
    while not lab["a"].posts:
        status, answered, _ = await lab.post(body, **headers)
        sent += 1
        assert (status, answered["x-engine"]) == (200, "b")
        assert sent < 100
    assert (len(lab["a"].posts), len(lab["b"].posts)) == (1, sent)


class TestOnARetry:
    """Round-robin over two replicas, one of which refuses or says 503: every second request meets it."""

    async def test_after_a_refused_connection(self, lab: Lab) -> None:
        for _ in range(4):
            assert (await lab.post(FRAIL))[0] == 200
        assert [item.body for item in posts(lab)] == [FRAIL] * 4
        fleet = await lab.extproc.fleet()
        assert fleet["dead"]["failures"] > 0

    async def test_after_a_503(self, lab: Lab) -> None:
        await met_by_a_503(lab, ODD)
        assert {item.body for item in posts(lab)} == {ODD}
        assert {item.headers["content-length"] for item in posts(lab)} == {str(len(ODD))}

    async def test_of_an_alias(self, lab: Lab) -> None:
        await met_by_a_503(lab, ALIASED)
        assert {item.body for item in posts(lab)} == {ODD}

    @pytest.mark.parametrize("encoding", ENCODERS)
    async def test_of_a_compressed_body(self, lab: Lab, encoding: str) -> None:
        body = ENCODERS[encoding](ODD)
        await met_by_a_503(lab, body, content_encoding=encoding)
        assert {item.body for item in posts(lab)} == {body}
        assert {item.headers["content-encoding"] for item in posts(lab)} == {encoding}

    async def test_of_an_alias_in_a_compressed_body(self, lab: Lab) -> None:
        frail_alias = gzip.compress(ODD.replace(b'"model" : "m"', b'"model" : "frail-alias"'))
        for _ in range(4):
            assert (await lab.post(frail_alias, content_encoding="gzip"))[0] == 200
        assert [item.body for item in posts(lab)] == [FRAIL] * 4
        assert not any("content-encoding" in item.headers for item in posts(lab))

    async def test_of_a_large_body(self, lab: Lab) -> None:
        body = chat("x" * (5 << 20), model="frail")
        for _ in range(2):
            assert (await lab.post(body))[0] == 200
        assert [len(item.body) for item in posts(lab)] == [len(body)] * 2
        assert all(item.body == body for item in posts(lab))


async def test_headers_of_the_client_pass_and_ours_do_not(lab: Lab) -> None:
    await lab.post(ODD, x_request_id="client-1", x_custom="kept")
    (received,) = posts(lab)
    assert received.headers["x-request-id"] == "client-1"
    assert received.headers["x-custom"] == "kept"
    assert [name for name in received.headers if name.startswith("x-gateway-")] == ["x-gateway-request-id"]
    assert "x-data-parallel-rank" not in received.headers


async def test_the_prompt_does_not_choose_the_model(lab: Lab) -> None:
    text = json.dumps({"model": "frail", "user": "x"})
    assert (await lab.post(chat(text)))[0] == 200
    decisions = (await lab.extproc.get("/decisions?count=1"))["decisions"]
    assert decisions[0]["pool"] == "pool"


async def test_a_hundred_headers_arrive(lab: Lab) -> None:
    many = {f"x-many-{number}": "1" for number in range(100)}
    assert (await lab.post(**many))[0] == 200
    (received,) = posts(lab)
    assert many.items() <= received.headers.items()


async def test_http_1_0_is_served_as_proxies_speak_it(lab: Lab) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", lab.gateway.envoy.port)
    body = chat()
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nHost: gateway\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    head, _, reply = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    assert b" 200 " in head.splitlines()[0]
    assert json.loads(reply)["object"] == "chat.completion"
