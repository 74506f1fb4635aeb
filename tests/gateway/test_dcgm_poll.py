"""GPU use read from a real HTTP server, with the faults its page can have."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from extproc.edge.dcgm_poll import DcgmPoll
from extproc.fleet.endpoint import Endpoint, EndpointSpec

PAGE = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a"} 40\nDCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b"} 80\n'


@dataclass
class Exporter:
    """A dcgm-exporter whose answer tests change while it runs."""

    url: str = ""
    answer: Callable[[], web.Response] = lambda: web.Response(text=PAGE)
    hang: bool = False
    requests: list[web.Request] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        if self.hang:
            await asyncio.Event().wait()
        return self.answer()


@pytest.fixture
async def exporter() -> AsyncIterator[Exporter]:
    running = Exporter()
    app = web.Application()
    app.router.add_get("/metrics", running.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    running.url = f"http://127.0.0.1:{runner.addresses[0][1]}/metrics?token=secret"
    try:
        yield running
    finally:
        await runner.cleanup()


def endpoint(url: str | None, *gpus: str, slot: int = 0) -> Endpoint:
    return Endpoint(EndpointSpec("c", f"10.0.0.{slot}:8000", "p", dcgm_url=url, dcgm_gpus=gpus), slot)


@asynccontextmanager
async def reading(*endpoints: Endpoint) -> AsyncIterator[None]:
    poll = DcgmPoll(
        {one.key: one for one in endpoints},
        interval_s=0.02,
        timeout_s=0.3,
        max_bytes=50_000,
        rng=random.Random(1),
    )
    task = asyncio.create_task(poll.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_the_use_is_kept_with_its_time_and_follows_the_page(exporter: Exporter) -> None:
    one = endpoint(exporter.url)
    before = time.monotonic()
    async with reading(one):
        await until(lambda: one.gpu_utilization == 0.8)
        assert before <= one.gpu_utilization_at <= time.monotonic()
        exporter.answer = lambda: web.Response(text=PAGE.replace("80", "0").replace("40", "0"))
        await until(lambda: one.gpu_utilization == 0.0)


async def test_endpoints_of_one_host_share_a_reading_and_see_their_own_gpus(exporter: Exporter) -> None:
    first, second = endpoint(exporter.url, "0", slot=1), endpoint(exporter.url, "GPU-b", slot=2)
    async with reading(first, second):
        await until(lambda: second.gpu_utilization is not None)
    assert (first.gpu_utilization, second.gpu_utilization) == (0.4, 0.8)
    assert first.gpu_utilization_at == second.gpu_utilization_at


async def test_an_endpoint_without_the_url_is_not_asked_about(exporter: Exporter) -> None:
    one, silent = endpoint(exporter.url, slot=1), endpoint(None, slot=2)
    async with reading(one, silent):
        await until(lambda: len(exporter.requests) >= 2)
    assert silent.gpu_utilization is None


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.Response(status=500, text=PAGE),
        lambda: web.Response(status=302, headers={"location": "/metrics"}, text=PAGE),
        lambda: web.Response(text=PAGE + "# " + "x" * 60_000),
        lambda: web.Response(body=b"\xff\xfe\x00"),
        lambda: web.Response(text=PAGE.replace("80", "NaN").replace("40", "NaN")),
    ],
    ids=["status", "redirect", "too large", "binary", "nan"],
)
async def test_a_bad_page_leaves_the_last_value_and_the_health_as_they_were(
    exporter: Exporter, answer: Callable[[], web.Response]
) -> None:
    one = endpoint(exporter.url)
    async with reading(one):
        await until(lambda: one.gpu_utilization == 0.8)
        exporter.answer = answer
        asked = len(exporter.requests)
        await until(lambda: len(exporter.requests) >= asked + 3)
        at = one.gpu_utilization_at
        await until(lambda: len(exporter.requests) >= asked + 5)
    assert (one.gpu_utilization, one.gpu_utilization_at) == (0.8, at)
    assert one.health.failures == 0
    assert one.scrape_failures == 0
    assert not one.health.excluded(time.monotonic())


async def test_a_page_that_never_comes_is_given_up_and_asked_for_again(exporter: Exporter) -> None:
    one = endpoint(exporter.url)
    exporter.hang = True
    async with reading(one):
        await until(lambda: len(exporter.requests) >= 2)
        assert one.gpu_utilization is None
        exporter.hang = False
        await until(lambda: one.gpu_utilization == 0.8)


async def test_the_beginning_and_the_end_of_a_fault_are_logged_once_without_the_query(
    exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "extproc.edge.dcgm_poll")
    one = endpoint(exporter.url)
    exporter.answer = lambda: web.Response(status=503)
    async with reading(one):
        await until(lambda: len(exporter.requests) >= 4)
        exporter.answer = lambda: web.Response(text=PAGE)
        await until(lambda: len(caplog.records) >= 2)
    assert [record.message for record in caplog.records] == ["GPU use not read", "GPU use is read again"]
    assert caplog.records[0].__dict__["reason"] == "status 503"
    assert all("secret" not in str(record.__dict__) for record in caplog.records)


async def test_an_engine_beside_an_exporter_that_is_down_is_not_blamed(exporter: Exporter) -> None:
    down = endpoint("http://127.0.0.1:1/metrics", slot=1)
    up = endpoint(exporter.url, slot=2)
    async with reading(down, up):
        await until(lambda: up.gpu_utilization == 0.8)
    assert down.gpu_utilization is None
    assert down.health.failures == 0
