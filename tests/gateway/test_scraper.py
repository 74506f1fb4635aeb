"""The scraper against a real HTTP server with every fault a metrics page can have."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from aiohttp import web

from extproc.edge.scraper import Access, Scraper, ScrapeSettings
from extproc.engines.state import EngineState
from extproc.fleet.endpoint import Endpoint, EndpointSpec

PAGE = """\
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_waiting{engine="0"} 2
vllm:kv_cache_usage_perc 0.5
"""
FAST = ScrapeSettings(interval_s=0.05, timeout_s=0.3, max_bytes=200_000)


@dataclass
class Server:
    """A metrics server whose page and behaviour tests change while it runs."""

    port: int = 0
    answer: Callable[[web.Request], object] = lambda request: web.Response(text=PAGE)
    requests: list[web.Request] = field(default_factory=list)
    peers: set[object] = field(default_factory=set)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        answer = self.answer(request)
        if asyncio.iscoroutine(answer):
            answer = await answer
        assert isinstance(answer, web.StreamResponse)
        return answer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as running:
        yield running


class FleetDouble:
    """Keeps what it is told, as the fleet does."""

    def __init__(self, *specs: EndpointSpec) -> None:
        self.endpoints = {spec.key: Endpoint(spec, slot) for slot, spec in enumerate(specs)}
        self.states: list[tuple[str, EngineState]] = []
        self.failures: list[tuple[str, bool]] = []

    def scraped(self, endpoint: Endpoint, state: EngineState, now: float) -> None:
        endpoint.state = state
        endpoint.scrape_failures = 0
        self.states.append((endpoint.key, state))

    def scrape_failed(
        self, endpoint: Endpoint, now: float, *, refused: bool = False, timed_out: bool = False
    ) -> None:
        endpoint.scrape_failures += 1
        self.failures.append((endpoint.key, refused))


def spec(address: str, **changes: object) -> EndpointSpec:
    return replace(EndpointSpec("c", address, "pool"), **changes)  # type: ignore[arg-type]


@dataclass
class Run:
    fleet: FleetDouble
    results: list[str] = field(default_factory=list)

    @property
    def endpoint(self) -> Endpoint:
        return next(iter(self.fleet.endpoints.values()))


@asynccontextmanager
async def scraping(
    *specs: EndpointSpec,
    settings: ScrapeSettings = FAST,
    access: Callable[[EndpointSpec], Access] | None = None,
) -> AsyncIterator[Run]:
    run = Run(FleetDouble(*specs))
    scraper = Scraper(
        run.fleet,
        settings,
        access=access or (lambda _: Access()),
        on_result=lambda endpoint, reason, seconds: run.results.append(reason),
        rng=random.Random(1),
    )
    task = asyncio.create_task(scraper.run())
    try:
        yield run
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], object], deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "condition did not come true in time"
        await asyncio.sleep(0.01)


async def test_tells_the_fleet_what_the_page_says(server: Server) -> None:
    before = time.monotonic()
    async with scraping(spec(server.address)) as run:
        await until(lambda: len(run.fleet.states) >= 3)
    key, state = run.fleet.states[0]
    assert key == f"c/{server.address}"
    assert (state.running, state.waiting, state.kv_usage) == (3.0, 2.0, 0.5)
    assert before <= state.at <= time.monotonic()
    assert run.results[:3] == ["ok", "ok", "ok"]


async def test_keeps_one_connection_and_asks_for_plain_text(server: Server) -> None:
    async with scraping(spec(server.address)) as run:
        await until(lambda: len(run.fleet.states) >= 5)
    assert len(server.peers) == 1
    assert server.requests[0].path == "/metrics"
    assert server.requests[0].headers["accept-encoding"] == "identity"


async def test_path_and_port_of_the_endpoint_win(server: Server) -> None:
    async with scraping(spec("127.0.0.1:1", metrics_path="/m?x=1", metrics_port=server.port)) as run:
        await until(lambda: run.fleet.states)
    assert server.requests[0].path_qs == "/m?x=1"


async def test_credentials_of_the_cluster_are_sent(server: Server) -> None:
    async with scraping(
        spec(server.address), access=lambda _: Access(headers={"authorization": "Bearer engine-key"})
    ) as run:
        await until(lambda: run.fleet.states)
    assert server.requests[0].headers["authorization"] == "Bearer engine-key"


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"# slowly\n")
        await asyncio.sleep(0.05)


async def cut(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-length": "1000"})
    await response.prepare(request)
    await response.write(b"vllm:num_requests_running 3\n")
    assert request.transport is not None
    request.transport.abort()
    return response


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"# more\n" * 1000)


BOMB = gzip.compress(b"\n" * 20_000_000)


def bomb(request: web.Request) -> web.StreamResponse:
    return web.Response(body=BOMB, headers={"content-encoding": "gzip"})


FAULTS: list[tuple[str, Callable[[web.Request], object]]] = [
    ("timeout", hang),
    ("timeout", drip),
    ("broken", cut),
    ("too_large", endless),
    ("too_large", bomb),
    ("status", lambda request: web.Response(status=404, text="not here")),
    ("status", lambda request: web.Response(status=503, text=PAGE)),
    ("status", lambda request: web.Response(status=302, headers={"location": "/elsewhere"})),
    ("unreadable", lambda request: web.Response(text="<html>hello</html>")),
    ("unreadable", lambda request: web.Response(body=bytes(range(256)) * 100)),
    ("unreadable", lambda request: web.Response(text="")),
    ("broken", lambda request: web.Response(body=b"no gzip", headers={"content-encoding": "gzip"})),
]


@pytest.mark.parametrize(
    ("reason", "fault"), FAULTS, ids=[f"{reason}-{i}" for i, (reason, _) in enumerate(FAULTS)]
)
async def test_a_faulty_page_is_counted_keeps_the_last_state_and_is_no_refusal(
    server: Server, reason: str, fault: Callable[[web.Request], object]
) -> None:
    settings = FAST if reason == "timeout" else replace(FAST, timeout_s=10.0)
    async with scraping(spec(server.address), settings=settings) as run:
        await until(lambda: run.fleet.states)
        server.answer = fault
        before = len(run.results)
        await until(lambda: run.results[before:].count(reason) >= 2)
        assert run.endpoint.state is not None
        assert run.endpoint.state.running == 3.0
        assert not any(refused for _, refused in run.fleet.failures)
        server.answer = lambda request: web.Response(text=PAGE)
        await until(lambda: run.endpoint.scrape_failures == 0)


async def test_a_compressed_page_is_read_all_the_same(server: Server) -> None:
    server.answer = lambda request: web.Response(
        body=gzip.compress(PAGE.encode()), headers={"content-encoding": "gzip"}
    )
    async with scraping(spec(server.address)) as run:
        await until(lambda: run.fleet.states)
    assert run.fleet.states[0][1].running == 3.0


async def test_a_large_page_is_read_in_a_thread(server: Server) -> None:
    server.answer = lambda request: web.Response(text="# padding\n" * 10_000 + PAGE)
    async with scraping(spec(server.address), settings=replace(FAST, thread_above=1000)) as run:
        await until(lambda: run.fleet.states)
    assert run.fleet.states[0][1].running == 3.0


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_a_refused_connection_on_the_engines_own_port_is_said() -> None:
    async with scraping(spec(f"127.0.0.1:{closed_port()}")) as run:
        await until(lambda: len(run.fleet.failures) >= 2)
    assert all(refused for _, refused in run.fleet.failures)
    assert set(run.results) == {"refused"}


async def test_a_dead_metrics_port_says_nothing_about_the_engine(server: Server) -> None:
    async with scraping(spec(server.address, metrics_port=closed_port())) as run:
        await until(lambda: len(run.fleet.failures) >= 2)
    assert not any(refused for _, refused in run.fleet.failures)


async def test_one_hanging_endpoint_delays_no_other(server: Server) -> None:
    async with serving() as black_hole:
        black_hole.answer = hang
        good, bad = spec(server.address), spec(black_hole.address)
        async with scraping(good, bad, settings=replace(FAST, timeout_s=30.0)) as run:
            await until(lambda: len(black_hole.requests) == 1 and len(run.fleet.states) >= 5)
            assert len(black_hole.requests) == 1, "one scrape an endpoint at a time"
        assert {key for key, _ in run.fleet.states} == {good.key}


async def test_endpoints_come_and_go(server: Server) -> None:
    async with scraping() as run, serving() as other:
        first, second = Endpoint(spec(server.address), 0), Endpoint(spec(other.address), 1)
        run.fleet.endpoints[first.key] = first
        await until(lambda: first.state)
        del run.fleet.endpoints[first.key]
        first.removed = True
        run.fleet.endpoints[second.key] = second
        await until(lambda: second.state)
        asked = len(server.requests)
        heard = len(other.requests)
        await until(lambda: len(other.requests) >= heard + 3)
        assert len(server.requests) <= asked + 1


async def test_a_changed_metrics_path_is_followed(server: Server) -> None:
    async with scraping(spec(server.address)) as run:
        await until(lambda: run.fleet.states)
        run.endpoint.spec = spec(server.address, metrics_path="/other")
        await until(lambda: server.requests[-1].path == "/other")


async def test_engines_without_metrics_and_impossible_addresses_are_left_alone(server: Server) -> None:
    nowhere = spec("no-port-here", metrics_path="/metrics")
    async with scraping(
        spec(server.address, engine="other"), nowhere, spec(server.address, cluster="d")
    ) as run:
        await until(lambda: len(run.fleet.states) >= 3)
    assert {key for key, _ in run.fleet.states} == {f"d/{server.address}"}
    assert not run.fleet.failures
