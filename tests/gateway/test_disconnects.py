"""Clients that leave, and clients that would steer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.echo_engine import EchoEngine
from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Lab, chat, cluster, gather_bounded, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEAVING = 2000


def clusters(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
    return [
        cluster("a", engines["a"].address),
        cluster("b", engines["b"].address),
        cluster("secret", engines["secret"].address, pool="secret", model="secret"),
    ]


SETTINGS = {
    "default_pool": "pool",
    "pools": {"pool": {"strategy": "least-requests"}},
    "health": {"failures": 10_000},
    "responses": {"headers": True},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    directory = tmp_path_factory.mktemp("leaving")
    async with running_lab(directory, ("a", "b", "secret"), clusters, SETTINGS) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def lab(module_lab: Lab) -> Lab:
    await module_lab.settled()
    return module_lab


def request_bytes(body: bytes, *headers: str) -> bytes:
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: gateway",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


async def gauges(lab: Lab) -> dict[str, float]:
    """Everything that must be zero when nobody is there."""
    samples = await lab.extproc.metrics()
    names = (
        *("extproc_leases", "extproc_streams_in_flight", "extproc_buffered_bytes"),
        *("extproc_endpoint_leases", "extproc_endpoint_unstarted", "extproc_endpoint_backlog_tokens"),
    )
    return {name: value for name, value in samples.items() if name.split("{")[0] in names}


async def test_2000_requests_whose_clients_leave_at_random_leave_nothing_behind(lab: Lab) -> None:
    rng = random.Random(7)
    for engine in lab.engines.values():
        engine.chunks, engine.chunk_delay_s = 5, 0.02

    async def one(number: int) -> str:
        """Leaves while sending, before the answer, in the middle of it, or not at all."""
        body = chat(f"prompt {number % 50} " + "x" * rng.choice((10, 4000, 40_000)), stream=True)
        data = request_bytes(body, "connection: close")
        way = rng.choice(("sending", "before", "before", "middle", "middle", "stays"))
        reader, writer = await asyncio.open_connection("127.0.0.1", lab.gateway.envoy.port)
        try:
            writer.write(data if way != "sending" else data[: rng.randrange(1, len(data))])
            await writer.drain()
            if way in ("sending", "before"):
                # As long as a fast answer takes: some leave before extproc, some before the engine.
                await asyncio.sleep(rng.random() * 0.02)
            elif way == "middle":
                with contextlib.suppress(asyncio.IncompleteReadError):
                    await reader.readuntil(b"data: ")
            else:
                reply = await reader.read()
                assert reply.startswith(b"HTTP/1.1 200"), reply[:200]
                assert b"[DONE]" in reply
        finally:
            writer.transport.abort()
        return way

    before = await lab.extproc.metrics()
    ways = await gather_bounded(LEAVING, 64, one)
    await lab.extproc.idle(20)
    assert set((await gauges(lab)).values()) == {0.0}
    await until(lambda: not sum(engine.active for engine in lab.engines.values()), 5, "engines are idle")
    after = await lab.extproc.metrics()
    begun = sum(engine.begun for engine in lab.engines.values())
    aborted = sum(engine.aborted for engine in lab.engines.values())
    grown = {
        name: after[name] - before.get(name, 0.0)
        for name in after
        if name.startswith(("extproc_leases_ended_total", "extproc_records_odd", "extproc_streams_c"))
    }
    print(
        f"\n{ {way: ways.count(way) for way in sorted(set(ways))} }: {begun} reached an engine, {aborted} were"
    )
    print(f"aborted there; {grown}")
    assert aborted > ways.count("middle") * 0.9
    assert begun - aborted >= ways.count("stays")
    assert grown['extproc_leases_ended_total{how="dead"}'] == 0
    assert grown['extproc_records_odd_total{why="unreadable"}'] == 0
    assert grown['extproc_records_odd_total{why="unknown"}'] == 0
    assert after["extproc_streams_failed_total"] == before["extproc_streams_failed_total"]
    # Clients that leave say nothing about engines.
    assert {row["failures"] for row in (await lab.extproc.fleet()).values()} == {0}
    assert (await lab.post())[0] == 200


async def test_an_engine_hears_at_once_that_its_client_left(lab: Lab) -> None:
    for engine in lab.engines.values():
        engine.chunks, engine.gate = 2, asyncio.Event()
    _, writer = await asyncio.open_connection("127.0.0.1", lab.gateway.envoy.port)
    writer.write(request_bytes(chat(stream=True)))
    await until(lambda: lab["a"].active + lab["b"].active == 1, 5, "the engine works")
    writer.transport.abort()
    await until(lambda: lab["a"].aborted + lab["b"].aborted == 1, 1, "the engine stops")
    await lab.extproc.idle(1)


class TestControlHeaders:
    FORGED = (
        ("x-gateway-request-id", "mine"),
        ("x-gateway-cluster", "secret"),
        ("x-gateway-destination-endpoint", "127.0.0.1:1"),
        ("x-gateway-tenant", "root"),
        ("x-envoy-max-retries", "9"),
        ("x-envoy-retry-on", "5xx"),
        ("x-envoy-upstream-rq-timeout-ms", "1"),
        ("x-envoy-original-path", "/other"),
        ("x-envoy-decorator-operation", "x"),
    )

    async def test_cannot_choose_an_endpoint_or_an_id(self, lab: Lab) -> None:
        for _ in range(4):
            async with lab.session.post(
                lab.url + "/v1/chat/completions", data=chat(), headers=self.FORGED
            ) as reply:
                assert reply.status == 200
                assert reply.headers["x-engine"] in ("a", "b")
                identity = reply.headers["x-gateway-request-id"]
        assert lab["secret"].posts == []
        received = [*lab["a"].posts, *lab["b"].posts]
        assert identity in {item.headers["x-gateway-request-id"] for item in received}
        for item in received:
            assert item.headers["x-gateway-request-id"] != "mine"
            control = [name for name in item.headers if name.startswith(("x-gateway-", "x-envoy-"))]
            assert set(control) <= {"x-gateway-request-id", "x-envoy-internal"}
        ids = [item["id"] for item in (await lab.extproc.get("/decisions?count=4"))["decisions"]]
        assert "mine" not in ids

    async def test_written_in_capitals_or_twice_are_gone_all_the_same(self, lab: Lab) -> None:
        forged = ("X-Gateway-Cluster: secret", "x-GATEWAY-cluster: secret", "X-Gateway-Request-Id: mine")
        reader, writer = await asyncio.open_connection("127.0.0.1", lab.gateway.envoy.port)
        writer.write(request_bytes(chat(), *forged, "connection: close"))
        reply = await reader.read()
        writer.close()
        assert reply.startswith(b"HTTP/1.1 200")
        assert lab["secret"].posts == []

    async def test_do_not_shorten_the_engines_time(self, lab: Lab) -> None:
        for engine in lab.engines.values():
            engine.chunks, engine.chunk_delay_s = 5, 0.05
        status, _, body = await lab.post(chat(stream=True), x_envoy_upstream_rq_timeout_ms="1")
        assert (status, body.count(b"data: ")) == (200, 7)

    async def test_do_not_make_envoy_retry(self, lab: Lab) -> None:
        for engine in lab.engines.values():
            engine.status = 500
        status, _, _ = await lab.post(x_envoy_retry_on="5xx", x_envoy_max_retries="5")
        assert status == 500
        assert lab["a"].begun + lab["b"].begun == 1


async def test_two_requests_of_one_forged_id_are_two(lab: Lab) -> None:
    for engine in lab.engines.values():
        engine.gate = asyncio.Event()
    running = [asyncio.create_task(lab.post(x_gateway_request_id="same")) for _ in range(2)]
    await until(lambda: lab["a"].active + lab["b"].active == 2, 5, "both run")
    assert (await lab.extproc.metrics())["extproc_leases"] == 2
    for engine in lab.engines.values():
        assert engine.gate is not None
        engine.gate.set()
    assert [status for status, _, _ in await asyncio.gather(*running)] == [200, 200]


async def test_a_client_that_sends_a_second_request_on_its_connection_is_served(lab: Lab) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", lab.gateway.envoy.port)
    writer.write(request_bytes(chat("one")) + request_bytes(chat("two"), "connection: close"))
    reply = await reader.read()
    writer.close()
    assert reply.count(b"HTTP/1.1 200") == 2
    bodies = {json.loads(item.body)["messages"][0]["content"] for item in [*lab["a"].posts, *lab["b"].posts]}
    assert bodies == {"one", "two"}
