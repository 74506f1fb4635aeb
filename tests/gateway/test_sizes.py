"""Large bodies, both ways."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import brotli
import pytest
import pytest_asyncio

from tests.gateway.echo_engine import EchoEngine
from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Lab, chat, cluster, gather_bounded, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20


def clusters(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
    return [cluster("a", engines["a"].address)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    async with running_lab(tmp_path_factory.mktemp("sizes"), ("a",), clusters) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def lab(module_lab: Lab) -> Lab:
    await module_lab.settled()
    return module_lab


def sized(size: int) -> bytes:
    """A chat request of exactly this many bytes."""
    return chat("x" * (size - len(chat(""))))


@pytest.mark.parametrize("size", [32 * 1024 + 1, MIB, 12 * MIB, 20 * MIB, 64 * MIB])
async def test_bodies_up_to_the_limit_pass(lab: Lab, size: int) -> None:
    body = sized(size)
    status, _, reply = await lab.post(body)
    assert status == 200, reply
    (received,) = lab["a"].posts
    assert received.body == body


async def test_a_body_sent_in_chunks_passes(lab: Lab) -> None:
    body = sized(3 * MIB)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    async with lab.session.post(lab.url + "/v1/chat/completions", data=pieces()) as reply:
        assert reply.status == 200
    (received,) = lab["a"].posts
    assert received.body == body


class TestTooLarge:
    async def test_in_openai_shape(self, lab: Lab) -> None:
        status, headers, reply = await lab.post(sized(70 * MIB))
        assert (status, headers["content-type"]) == (413, "application/json")
        error = json.loads(reply)["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")
        assert lab["a"].posts == []

    async def test_in_anthropic_shape(self, lab: Lab) -> None:
        status, _, reply = await lab.post(sized(70 * MIB), "/v1/messages")
        answer = json.loads(reply)
        assert (status, answer["type"], answer["error"]["type"]) == (413, "error", "request_too_large")

    async def test_leaves_nothing_behind(self, lab: Lab) -> None:
        await lab.post(sized(70 * MIB))
        await lab.extproc.idle()
        assert (await lab.post())[0] == 200


async def test_a_30_mb_reply_passes_as_it_comes_and_not_through_us(lab: Lab) -> None:
    engine = lab["a"]
    engine.big_reply = 30_000_000
    engine.gate = asyncio.Event()
    before = await lab.extproc.metrics()
    body = json.dumps({"model": "m", "input": ["a", "b"]}).encode()
    async with lab.session.post(lab.url + "/v1/embeddings", data=body) as reply:
        assert (reply.status, reply.headers["content-length"]) == (200, "30000000")
        # The engine waits with the rest until the beginning has arrived.
        begun = await reply.content.readany()
        assert begun.startswith(b'{"object":"list"')
        assert engine.active == 1
        engine.gate.set()
        rest = await reply.content.read()
    assert len(begun) + len(rest) == 30_000_000
    await lab.extproc.idle()
    after = await lab.extproc.metrics()
    name = "extproc_process_resident_memory_bytes"
    print(f"\nRSS of extproc: {before[name] / MIB:.1f} -> {after[name] / MIB:.1f} MiB over a 30 MB reply")
    assert after[name] - before[name] < 8 * MIB
    assert after["extproc_messages_total"] - before["extproc_messages_total"] == 2


async def test_many_large_bodies_for_an_unknown_model_cost_no_memory(lab: Lab) -> None:
    body = chat("x" * MIB, model="nobody-serves-this")

    async def one(_number: int) -> int:
        status, _, reply = await lab.post(body)
        assert json.loads(reply)["error"]["code"] == "model_not_found"
        return status

    assert await gather_bounded(10, 5, one) == [404] * 10
    before = await lab.extproc.rss_mb()
    assert await gather_bounded(50, 50, one) == [404] * 50
    await lab.extproc.idle()
    after = await lab.extproc.rss_mb()
    print(f"\nRSS of extproc: {before:.1f} -> {after:.1f} MiB over 50 concurrent refused bodies of 1 MiB")
    assert after - before < 100
    assert "xxxxxxxx" not in lab.extproc.log


async def test_odd_and_large_json_does_not_hold_up_small_requests(lab: Lab) -> None:
    """A lone surrogate makes the fast reader give up; the slow one runs in a thread."""
    body = b'{"model":"m","messages":[{"role":"user","content":"\\ud800 ' + b"y" * (5 * MIB) + b'"}]}'
    large = asyncio.create_task(lab.post(body))
    small = 0
    while not large.done():
        assert (await lab.post())[0] == 200
        small += 1
    assert (await large)[0] == 200
    assert small > 0
    worst = (await lab.extproc.metrics())["extproc_loop_lag_worst_seconds"]
    print(f"\n{small} small requests beside it; worst loop lag of the last 10 s: {worst * 1000:.0f} ms")


async def test_body_bytes_held_come_back_when_the_client_leaves_while_it_sends(lab: Lab) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", lab.gateway.envoy.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n")
    writer.write(b"x" * 1_000_000)
    await writer.drain()
    await until(lambda: _streams(lab), 5, "the request has come to extproc")
    writer.transport.abort()
    await lab.extproc.idle()
    assert reader is not None


async def _streams(lab: Lab) -> bool:
    return (await lab.extproc.metrics())["extproc_streams_in_flight"] == 1


async def test_tiny_bodies_that_unpack_to_much_do_not_take_the_gateway_from_others(lab: Lab) -> None:
    empty_members = gzip.compress(b"", mtime=0) * 300_000
    zeros = brotli.compress(b"\0" * (48 * MIB), quality=1)
    hostile = [
        asyncio.create_task(lab.post(body, content_encoding=coding))
        for _ in range(6)
        for body, coding in ((empty_members, "gzip"), (zeros, "br"))
    ]
    while not all(task.done() for task in hostile):
        status, _, _ = await lab.post()
        assert status == 200
        await asyncio.sleep(0.02)
    assert {task.result()[0] for task in hostile} == {200}
    await lab.extproc.idle()
