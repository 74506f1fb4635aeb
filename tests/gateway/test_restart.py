"""extproc dies, freezes and comes back while requests run: what clients see, and what is known afterwards.

Times are printed, not asserted: only generous bounds are, so that nothing hangs.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Lab, chat, renew_every, running_lab

SETTINGS = {"pools": {"pool": {"strategy": "least-requests"}}}
PATIENCE_S = 10.0


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with running_lab(tmp_path, ("a", "b"), settings=SETTINGS, change=renew_every(0.3)) as running:
        yield running


@dataclass(slots=True)
class Seen:
    """What one request of the load met."""

    at: float
    took: float
    status: int
    body: bytes = field(repr=False, default=b"")


class Load:
    """``clients`` loops that send small requests one after another, until ``stop``."""

    def __init__(self, lab: Lab, clients: int = 8) -> None:
        self.seen: list[Seen] = []
        self._lab = lab
        self._over = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        while not self._over:
            began = time.monotonic()
            async with asyncio.timeout(PATIENCE_S):
                status, _, body = await self._lab.post()
            self.seen.append(Seen(began, time.monotonic() - began, status, body))
            await asyncio.sleep(0.01)

    async def stop(self) -> list[Seen]:
        """Raises what a client met that was no HTTP answer: a hang, a broken connection."""
        self._over = True
        await asyncio.gather(*self._tasks)
        return self.seen

    def good_since(self, moment: float) -> bool:
        """Whether a request sent after ``moment`` was served."""
        return any(seen.status == 200 and seen.at > moment for seen in self.seen)

    def refused_since(self, moment: float) -> bool:
        return any(seen.status != 200 and seen.at > moment for seen in self.seen)


def report(name: str, seen: list[Seen], fault: float, recovery: float) -> None:
    bad = [one for one in seen if one.status != 200]
    good = [one for one in seen if one.status == 200 and one.at < fault]
    slowest = max((one.took for one in seen), default=0.0)
    first_good = min(
        (one.at + one.took for one in seen if one.status == 200 and one.at > recovery), default=0.0
    )
    last_bad = max((one.at for one in bad), default=recovery)
    codes = Counter(json.loads(one.body)["error"]["message"] for one in bad)
    slow = sorted((one.took for one in bad), reverse=True)[:10]
    print(
        f"\n{name}: {len(seen)} requests ({len(good)} before), {Counter(one.status for one in seen)}, {codes}"
    )
    print(f"  slowest answer {slowest:.3f} s; slowest refusals {[round(one, 3) for one in slow]}")
    print(
        f"  first served {first_good - recovery:.3f} s after recovery, last refusal sent {last_bad - recovery:+.3f} s"
    )


def in_shape(seen: list[Seen]) -> None:
    """Every refusal is a 503 that clients can read."""
    for one in seen:
        if one.status != 200:
            assert one.status == 503
            error = json.loads(one.body)["error"]
            assert error["type"] == "gateway_error"
            assert error["code"] == "gateway_error"
            assert error["message"]
            assert ".sock" not in error["message"]


async def test_kill_9_under_load(lab: Lab) -> None:
    load = Load(lab)
    await until(lambda: len(load.seen) > 50, 10, "load runs")
    fault = time.monotonic()
    await lab.extproc.kill()
    killed = time.monotonic()
    await until(lambda: load.refused_since(killed), 5, "clients are refused")
    restarted = time.monotonic()
    await lab.gateway.restart_extproc()
    await lab.extproc.ready()
    ready = time.monotonic()
    await until(lambda: load.good_since(ready), 10, "clients are served again")
    seen = await load.stop()
    report(f"kill -9 (start to ready {ready - restarted:.2f} s)", seen, fault, ready)
    in_shape(seen)
    await lab.extproc.idle()


async def test_a_restart_by_sigterm_under_load(lab: Lab) -> None:
    """One extproc alone cannot be restarted unnoticed; but what it has begun to decide it ends."""
    load = Load(lab)
    await until(lambda: len(load.seen) > 50, 10, "load runs")
    fault = time.monotonic()
    lab.extproc.send(signal.SIGTERM)
    await lab.extproc.child.process.wait()
    ended = time.monotonic()
    assert lab.extproc.child.process.returncode == 0
    await lab.gateway.restart_extproc()
    await lab.extproc.ready()
    ready = time.monotonic()
    await until(lambda: load.good_since(ready), 10, "clients are served again")
    seen = await load.stop()
    report(f"SIGTERM (ended after {ended - fault:.2f} s)", seen, fault, ready)
    in_shape(seen)


async def test_frozen_under_load(lab: Lab) -> None:
    load = Load(lab)
    await until(lambda: len(load.seen) > 50, 10, "load runs")
    fault = time.monotonic()
    lab.extproc.send(signal.SIGSTOP)
    try:
        # Refused at once, as soon as the health check has seen it.
        await until(
            lambda: any(one.status == 503 and one.took < 0.2 and one.at > fault for one in load.seen),
            10,
            "clients are refused without waiting",
        )
        noticed = min(one.at for one in load.seen if one.status == 503 and one.took < 0.2 and one.at > fault)
    finally:
        lab.extproc.send(signal.SIGCONT)
    thawed = time.monotonic()
    await until(lambda: load.good_since(thawed), 10, "clients are served again")
    seen = await load.stop()
    report(f"SIGSTOP (noticed after {noticed - fault:.2f} s)", seen, fault, thawed)
    in_shape(seen)
    await lab.extproc.idle()


async def test_a_short_freeze_is_only_a_delay(lab: Lab) -> None:
    load = Load(lab)
    await until(lambda: len(load.seen) > 50, 10, "load runs")
    fault = time.monotonic()
    lab.extproc.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(0.3)  # the length of the freeze is what is tested
    finally:
        lab.extproc.send(signal.SIGCONT)
    thawed = time.monotonic()
    await until(lambda: load.good_since(thawed), 10, "clients are served again")
    seen = await load.stop()
    report("SIGSTOP for 0.3 s", seen, fault, thawed)
    assert {one.status for one in seen} == {200}


class TestRunningStreams:
    async def test_survive_and_are_taken_over(self, lab: Lab) -> None:
        gate = asyncio.Event()
        for engine in lab.engines.values():
            engine.chunks, engine.gate = 3, gate
        running = [asyncio.create_task(lab.post(chat(f"{n}", stream=True))) for n in range(10)]
        await until(lambda: lab["a"].active + lab["b"].active == 10, 5, "ten streams run")
        await lab.extproc.kill()
        await lab.gateway.restart_extproc()
        await lab.extproc.ready()
        ready = time.monotonic()

        async def adopted() -> bool:
            samples = await lab.extproc.metrics()
            return samples["extproc_leases"] == samples["extproc_leases_adopted_total"] == 10

        await until(adopted, 10, "the new extproc knows the ten")
        print(
            f"\nten running streams taken over {time.monotonic() - ready:.2f} s after the start (renewals: 0.3 s)"
        )
        fleet = await lab.extproc.fleet()
        assert {name: row["leases"] for name, row in fleet.items()} == {"a": 5, "b": 5}
        # New requests see them: both engines are equally full.
        for engine in lab.engines.values():
            engine.begun = 0
        more = [asyncio.create_task(lab.post(chat(f"new {n}", stream=True))) for n in range(10)]
        await until(lambda: lab["a"].begun + lab["b"].begun == 10, 5, "ten more run")
        assert (lab["a"].begun, lab["b"].begun) == (5, 5)
        gate.set()
        for status, _, body in await asyncio.gather(*running, *more):
            assert status == 200
            assert body.endswith(b"data: [DONE]\n\n")
        await lab.extproc.idle()
        samples = await lab.extproc.metrics()
        assert samples['extproc_leases_ended_total{how="dead"}'] == 0
        assert sum(row["leases"] for row in (await lab.extproc.fleet()).values()) == 0

    async def test_that_ended_meanwhile_are_not_waited_for(self, lab: Lab) -> None:
        gate = asyncio.Event()
        for engine in lab.engines.values():
            engine.chunks, engine.gate = 3, gate
        running = [asyncio.create_task(lab.post(chat(f"{n}", stream=True))) for n in range(6)]
        await until(lambda: lab["a"].active + lab["b"].active == 6, 5, "six streams run")
        await lab.extproc.kill()
        gate.set()
        assert {status for status, _, _ in await asyncio.gather(*running)} == {200}
        await lab.gateway.restart_extproc()
        await lab.extproc.ready()
        await lab.gateway.decides()
        await until(lambda: _served(lab), 5, "requests pass")
        await lab.extproc.idle()


async def _served(lab: Lab) -> bool:
    try:
        return (await lab.post())[0] == 200
    except aiohttp.ClientError:
        return False


async def test_the_log_stream_comes_back_by_itself(lab: Lab) -> None:
    await lab.extproc.kill()
    await lab.gateway.restart_extproc()
    await lab.extproc.ready()
    await until(lambda: _served(lab), 10, "requests pass")
    await lab.extproc.idle()
    assert (await lab.extproc.metrics())["extproc_log_streams"] >= 1
    assert (await lab.extproc.total("extproc_requests_total")) >= 1
