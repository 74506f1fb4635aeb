"""Waiting: Envoy holds a request as long as the queue says, priorities go first, and whoever leaves reaches no engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.gateway.echo_engine import EchoEngine
from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Lab, chat, cluster, running_lab
from tests.gateway.test_tenants import sha


def one_at_a_time(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
    return [cluster(name, engine.address, max_concurrency=1) for name, engine in engines.items()]


async def waiting(lab: Lab, count: int) -> None:
    async def so_many() -> bool:
        return await lab.extproc.total("extproc_queue_requests") == count

    await until(so_many, 5, f"{count} requests wait")


def busy(lab: Lab) -> asyncio.Event:
    """The engine answers nothing until the event is set."""
    lab["e"].gate = asyncio.Event()
    return lab["e"].gate


async def test_a_request_waits_for_longer_than_envoys_message_timeout(tmp_path: Path) -> None:
    """Envoy gives up on a silent extproc after 5 s: the queue asks it once for the whole wait."""
    async with running_lab(tmp_path, ["e"], one_at_a_time) as lab:
        gate = busy(lab)
        first = asyncio.create_task(lab.post())
        await until(lambda: lab["e"].active == 1, 5, "the first runs")
        second = asyncio.create_task(lab.post())
        await waiting(lab, 1)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(second), 7)
        assert not second.done()
        report = await lab.extproc.get("/queue")
        assert report["pools"][0]["requests"] == 1
        gate.set()
        assert [(await first)[0], (await second)[0]] == [200, 200]


async def test_the_deadline_is_a_503_and_ends_at_dispatch(tmp_path: Path) -> None:
    settings = {"admission": {"max_wait": "1s"}}
    async with running_lab(tmp_path, ["e"], one_at_a_time, settings) as lab:
        gate = busy(lab)
        first = asyncio.create_task(lab.post())
        await until(lambda: lab["e"].active == 1, 5, "the first runs")
        status, headers, body = await lab.post()
        assert (status, headers["retry-after"]) == (503, "1")
        assert b"queue_timeout" in body
        # The first has run for longer than any request may wait.
        gate.set()
        assert (await first)[0] == 200
        assert lab["e"].begun == 1


async def test_a_client_that_leaves_the_queue_reaches_no_engine(tmp_path: Path) -> None:
    async with running_lab(tmp_path, ["e"], one_at_a_time) as lab:
        gate = busy(lab)
        first = asyncio.create_task(lab.post())
        await until(lambda: lab["e"].active == 1, 5, "the first runs")
        leaving = asyncio.create_task(lab.post())
        await waiting(lab, 1)
        leaving.cancel()
        await waiting(lab, 0)
        gate.set()
        assert (await first)[0] == 200
        await lab.extproc.idle()
        assert lab["e"].begun == 1


async def test_the_higher_priority_goes_first(tmp_path: Path) -> None:
    settings = {
        "tiers": {"critical": {"priority": 10}, "batch": {"priority": -10}},
        "tenants": {
            "urgent": {"keys": [sha("u")], "tier": "critical"},
            "slow": {"keys": [sha("s")], "tier": "batch"},
        },
    }
    async with running_lab(tmp_path, ["e"], one_at_a_time, settings) as lab:
        gate = busy(lab)
        tasks = [asyncio.create_task(lab.post(chat("first"), x_api_key="s"))]
        await until(lambda: lab["e"].active == 1, 5, "the first runs")
        for place, (key, text) in enumerate([("s", "slow-1"), ("s", "slow-2"), ("u", "urgent")]):
            tasks.append(asyncio.create_task(lab.post(chat(text), x_api_key=key)))
            await waiting(lab, place + 1)
        gate.set()
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 4
        order = [received.body for received in lab["e"].posts]
        assert [b"urgent" in body for body in order] == [False, True, False, False]


async def test_a_full_queue_refuses_and_tells_when_to_come_back(tmp_path: Path) -> None:
    settings = {"admission": {"max_requests": 1}}
    async with running_lab(tmp_path, ["e"], one_at_a_time, settings) as lab:
        gate = busy(lab)
        running = [asyncio.create_task(lab.post())]
        await until(lambda: lab["e"].active == 1, 5, "the first runs")
        running.append(asyncio.create_task(lab.post()))
        await waiting(lab, 1)
        status, headers, body = await lab.post()
        assert (status, headers["retry-after"]) == (429, "1")
        assert b'"overloaded"' in body
        gate.set()
        assert [status for status, _, _ in await asyncio.gather(*running)] == [200, 200]


async def test_waiting_requests_survive_a_reload(tmp_path: Path) -> None:
    async with running_lab(tmp_path, ["e"], one_at_a_time) as lab:
        gate = busy(lab)
        tasks = [asyncio.create_task(lab.post())]
        await until(lambda: lab["e"].active == 1, 5, "the first runs")
        tasks.append(asyncio.create_task(lab.post()))
        await waiting(lab, 1)
        with lab.gateway.config_file.open("a") as file:
            file.write("admission: {max_wait: 20s}\n")

        async def taken() -> bool:
            return (await lab.extproc.metrics())["extproc_config_generation"] == 2

        await until(taken, 10, "the reload")
        gate.set()
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200, 200]


async def test_under_three_times_the_load_the_critical_go_first_and_the_lowest_go_on(tmp_path: Path) -> None:
    """The story of the unit test in virtual time, coarse: a real Envoy, an engine with four places of 0.3 s."""
    settings = {
        "admission": {"max_wait": "2s", "headroom": 0.25},
        "tiers": {"critical": {"priority": 10}, "batch": {"priority": -10}},
        "tenants": {
            "urgent": {"keys": [sha("u")], "tier": "critical"},
            "slow": {"keys": [sha("s")], "tier": "batch"},
            "other": {"keys": [sha("o")], "tier": "batch"},
        },
    }

    def four_places(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
        return [cluster(name, engine.address, max_concurrency=4) for name, engine in engines.items()]

    async with running_lab(tmp_path, ["e"], four_places, settings) as lab:
        lab["e"].chunks, lab["e"].chunk_delay_s = 5, 0.06
        loop = asyncio.get_running_loop()
        answers: dict[str, list[tuple[int, float]]] = {"u": [], "s": [], "o": []}

        async def ask(key: str, at: float) -> None:
            await asyncio.sleep(at)
            began = loop.time()
            status, _, _ = await lab.post(chat(stream=True), x_api_key=key)
            answers[key].append((status, loop.time() - began))

        plan = [(key, n / 40 * 3) for n in range(40) for key in ("s", "o")] + [
            ("u", n / 8) for n in range(24)
        ]
        await asyncio.gather(*(ask(key, at) for key, at in plan))
        assert {status for status, _ in answers["u"]} == {200}
        assert sorted(took for _, took in answers["u"])[21] < 1.0
        low = answers["s"] + answers["o"]
        assert {status for status, _ in low} <= {200, 429, 503}
        served = {key: sum(status == 200 for status, _ in answers[key]) for key in ("s", "o")}
        assert min(served.values()) >= 4
        # Nobody hangs: wait, generation, and a margin for a slow machine.
        assert max(took for _, took in low) < 5.0
        await lab.extproc.idle()
        assert lab["e"].active == 0
