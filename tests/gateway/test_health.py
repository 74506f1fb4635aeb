"""Which engines get no requests, for how long, and what says nothing about an engine."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.simulator.faults import Faults
from extproc.simulator.presets import PRESETS
from extproc.simulator.server import Handle, serve
from tests.gateway.echo_engine import EchoEngine, running_engine
from tests.gateway.envoy_process import free_port, until
from tests.gateway.gateway_process import (
    Gateway,
    Lab,
    chat,
    cluster,
    gather_bounded,
    running_gateway,
    running_lab,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE_POOL = {"pools": {"pool": {"strategy": "round-robin", "fallbacks": 2}}}
QUICK = {"health": {"failures": 3, "backoff": 0.5, "max_backoff": 2}}
SLOW_SCRAPES = {"scrape": {"interval": 3600}}


async def excluded(lab: Lab) -> set[str]:
    return {name for name, row in (await lab.extproc.fleet()).items() if row["excluded"]}


class TestDead:
    async def test_is_excluded_after_a_few_attempts(self, tmp_path: Path) -> None:
        """No scrape helps here: only requests say that nobody is there."""
        dead = f"127.0.0.1:{free_port()}"

        def clusters(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
            return [cluster("dead", dead), cluster("a", engines["a"].address)]

        settings = ONE_POOL | SLOW_SCRAPES | {"health": {"failures": 3, "backoff": 30}}
        async with running_lab(tmp_path, ("a",), clusters, settings) as lab:
            for number in range(30):
                assert (await lab.post(chat(f"{number}")))[0] == 200
            await lab.extproc.idle()
            samples = await lab.extproc.metrics()
            attempts = sum(v for k, v in samples.items() if k.startswith("extproc_attempts_failed_total"))
            print(
                f"\n30 requests, round-robin over a dead and a living replica: {attempts:.0f} failed attempts"
            )
            assert 3 <= attempts <= 6
            assert await excluded(lab) == {"dead"}
            assert samples[f'extproc_endpoint_excluded{{endpoint="dead/{dead}",pool="pool"}}'] == 1

    async def test_one_of_two_under_100_at_once_costs_no_client_an_error(self, tmp_path: Path) -> None:
        async with running_engine("b") as b:
            dead_port = free_port()

            def clusters(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
                return [cluster("a", engines["a"].address), cluster("dead", f"127.0.0.1:{dead_port}")]

            async with running_lab(tmp_path, ("a",), clusters, QUICK) as lab:
                started = time.monotonic()

                async def one(number: int) -> int:
                    return (await lab.post(chat(f"{number}", stream=True)))[0]

                assert Counter(await gather_bounded(500, 100, one)) == {200: 500}
                await until(lambda: _excluded_is(lab, {"dead"}), 5, "the dead one is excluded")
                print(f"\nexcluded {time.monotonic() - started:.2f} s after the first request at the latest")
                assert b.begun == 0

    async def test_comes_back_gently_when_it_listens_again(self, tmp_path: Path) -> None:
        port = free_port()

        def clusters(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
            return [cluster("a", engines["a"].address), cluster("back", f"127.0.0.1:{port}")]

        settings = ONE_POOL | QUICK | SLOW_SCRAPES
        async with running_lab(tmp_path, ("a",), clusters, settings) as lab:
            for number in range(6):
                await lab.post(chat(f"{number}"))
            await until(lambda: _excluded_is(lab, {"back"}), 5, "excluded")
            async with running_engine("back", port=port) as back:
                gate = asyncio.Event()
                lab["a"].gate = back.gate = gate
                # On probation it may hold one request.
                await until(lambda: _excluded_is(lab, set()), 10, "the exclusion ends")
                running = [asyncio.create_task(lab.post(chat(f"{n}"))) for n in range(10)]
                await until(lambda: lab["a"].active + back.active == 10, 5, "all run")
                assert back.active == 1
                gate.set()
                assert {status for status, _, _ in await asyncio.gather(*running)} == {200}
                for number in range(20):
                    await lab.post(chat(f"{number}"))
                assert back.begun >= 5


async def _excluded_is(lab: Lab, names: set[str]) -> bool:
    return await excluded(lab) == names


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    directory = tmp_path_factory.mktemp("pair")
    async with running_lab(directory, ("a", "b"), settings=ONE_POOL | QUICK) as lab:
        yield lab


class TestWhatSaysSomethingOfAnEngine:
    @pytest.mark.parametrize("status", [400, 404, 422, 429, 503])
    async def test_a_storm_of_client_errors_or_of_busy_replies_does_not(self, pair: Lab, status: int) -> None:
        await pair.settled()
        # Twenty busy answers in a row and the pool is given a moment's rest.
        count = 15 if status in (429, 503) else 50
        for engine in pair.engines.values():
            engine.status = status
        assert Counter([(await pair.post(chat(f"{n}")))[0] for n in range(count)]) == {status: count}
        for engine in pair.engines.values():
            engine.status = 200
        assert (await pair.post())[0] == 200
        await pair.extproc.idle()
        fleet = await pair.extproc.fleet()
        assert [(row["failures"], row["excluded"]) for row in fleet.values()] == [(0, False)] * 2

    async def test_500s_do(self, tmp_path: Path) -> None:
        async with running_lab(tmp_path, ("a", "b"), settings=ONE_POOL | QUICK) as lab:
            lab["a"].status = 500
            statuses = Counter([(await lab.post(chat(f"{n}")))[0] for n in range(40)])
            assert statuses[500] >= 3
            await lab.extproc.idle()
            assert (await lab.extproc.fleet())["b"]["failures"] == 0
            assert lab["b"].begun > lab["a"].begun

    async def test_the_last_endpoint_is_never_shut_out(self, tmp_path: Path) -> None:
        async with running_lab(tmp_path, ("a",), settings=ONE_POOL | {"health": {"backoff": 60}}) as lab:
            lab["a"].status = 500
            assert Counter([(await lab.post(chat(f"{n}")))[0] for n in range(10)]) == {500: 10}
            lab["a"].status = 200
            await lab.extproc.idle()
            assert await excluded(lab) == {"a"}
            assert (await lab.post())[0] == 200


Simulated = tuple[Gateway, list[Handle]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def four(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Simulated]:
    """Four simulated engines that give a token every 50 ms."""
    profile = PRESETS["demo"]
    handles = [await serve(profile, "m") for _ in range(4)]
    try:
        clusters = [cluster(f"e{n}", f"127.0.0.1:{handle.port}") for n, handle in enumerate(handles)]
        async with running_gateway(tmp_path_factory.mktemp("four"), clusters) as gateway:
            yield gateway, handles
    finally:
        for handle in handles:
            await handle.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def simulated(four: Simulated) -> Simulated:
    """The four, well again, and known to be so."""
    gateway, handles = four
    for handle in handles:
        await handle.set_faults(Faults())

    async def well() -> bool:
        rows = (await gateway.extproc.fleet()).values()
        return all(row["scrape_failures"] == 0 and not row["excluded"] for row in rows)

    await until(well, 10, "all four are well")
    await gateway.extproc.idle()
    return four


async def spread(gateway: Gateway, count: int) -> list[int]:
    """Leases by endpoint while ``count`` long requests run; they are given up then."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> None:
            body = chat(f"request {number} " + "words " * 200, stream=True, max_tokens=5000)
            async with session.post(gateway.url + "/v1/chat/completions", data=body) as reply:
                assert reply.status == 200
                await reply.read()

        tasks = [asyncio.create_task(one(number)) for number in range(count)]
        decided: list[int] = []

        async def all_decided() -> bool:
            nonlocal decided
            decided = [row["leases"] for row in (await gateway.extproc.fleet()).values()]
            return sum(decided) == count

        try:
            await until(all_decided, 20, f"{count} decided")
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in ended), ended
        return decided


@pytest.mark.parametrize(
    "fault",
    [Faults(freeze_metrics=True), Faults(no_metrics=True), Faults(garbage_metrics=True)],
    ids=["frozen", "absent", "garbage"],
)
async def test_without_true_metrics_our_own_leases_spread_requests(
    simulated: Simulated, fault: Faults
) -> None:
    gateway, handles = simulated
    for handle in handles:
        await handle.set_faults(fault)
    decided = await spread(gateway, 64)
    print(f"\n64 concurrent requests on 4 replicas: {decided}")
    assert max(decided) <= 1.2 * 64 / 4
    assert not any(row["excluded"] for row in (await gateway.extproc.fleet()).values())


async def test_one_frozen_page_among_true_ones_attracts_no_crowd(simulated: Simulated) -> None:
    gateway, handles = simulated
    await handles[0].set_faults(Faults(freeze_metrics=True))
    await until(lambda: _scraped(gateway), 5, "every page read")
    decided = await spread(gateway, 64)
    print(f"\n64 concurrent requests on 4 replicas, the first page frozen: {decided}")
    assert decided[0] <= 1.25 * 64 / 4
    assert max(decided) <= 2 * 64 / 4


async def test_blocked_metrics_are_seen_and_traffic_goes_on(tmp_path: Path) -> None:
    settings = {"scrape": {"interval": 0.1, "timeout": 0.1}}
    async with running_lab(tmp_path, ("a", "b"), settings=settings) as lab:
        assert (await lab.post())[0] == 200

        async def stale() -> bool:
            return (await lab.extproc.metrics()).get('extproc_pool_metrics_stale{pool="pool"}') == 1

        await until(stale, 10, "the pool's metrics are called stale")
        assert [(await lab.post(chat(f"{n}")))[0] for n in range(10)] == [200] * 10


async def _scraped(gateway: Gateway) -> bool:
    rows = (await gateway.extproc.fleet()).values()
    return all(row["scrape_age_s"] is not None for row in rows)


async def test_a_refused_scrape_excludes_before_any_request_is_lost(simulated: Simulated) -> None:
    gateway, handles = simulated
    await until(lambda: _scraped(gateway), 5, "every page read")
    await handles[1].set_faults(Faults(refuse=True))

    async def out() -> bool:
        return bool((await gateway.extproc.fleet())["e1"]["excluded"])

    started = time.monotonic()
    await until(out, 10, "the refusing one is excluded")
    print(f"\nexcluded by scrapes alone after {time.monotonic() - started:.1f} s")
    decided = await spread(gateway, 12)
    assert decided[1] == 0
    await handles[1].set_faults(Faults())

    async def back() -> bool:
        return not (await gateway.extproc.fleet())["e1"]["excluded"]

    started = time.monotonic()
    await until(back, 10, "it is taken back")
    print(f"taken back after {time.monotonic() - started:.1f} s")


async def test_a_down_engine_with_no_load_does_not_draw_or_disturb(simulated: Simulated) -> None:
    """Affinity: the same prompt stays where it is cached while a dead replica stands at zero."""
    gateway, handles = simulated
    await handles[3].set_faults(Faults(refuse=True))

    async def out() -> bool:
        return bool((await gateway.extproc.fleet())["e3"]["excluded"])

    await until(out, 10, "the refusing one is excluded")
    homes = set()
    async with aiohttp.ClientSession() as session:
        for number in range(6):
            body = chat("a shared beginning " * 400 + f"tail {number}", max_tokens=4)
            async with session.post(gateway.url + "/v1/chat/completions", data=body) as reply:
                assert reply.status == 200
                await reply.read()
            chosen = (await gateway.extproc.get("/decisions?count=1"))["decisions"][0]["chosen"]
            homes.add(chosen)
            await gateway.extproc.idle()
    assert len(homes) == 1


async def test_a_name_that_was_never_resolved_soon_gets_no_requests(tmp_path: Path) -> None:
    def clusters(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
        nowhere = cluster("nowhere", "name.invalid:80")
        nowhere["type"] = "STRICT_DNS"
        return [cluster("a", engines["a"].address), nowhere]

    async with running_lab(tmp_path, ("a",), clusters) as lab:
        statuses = [(await lab.post(chat(f"prompt {number}")))[0] for number in range(40)]
        await lab.extproc.idle()
        assert statuses.count(503) <= 6
        assert (await lab.extproc.fleet())["nowhere"]["circuit_why"] == "connect"
