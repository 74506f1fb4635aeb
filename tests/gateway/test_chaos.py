"""Engines die, hang, fail, stumble; extproc dies; its ears are cut: what clients see under steady load, and for how long.

Each fault hits one engine of four, for a few seconds, under 40 requests a second of short streams. Printed: errors that
clients saw, how long until the gateway's traffic avoided the engine (until half a second passed without one for it;
trials come later), and how long after the fault until it had its share back. The circuits' times are
shortened (see ``SETTINGS``), so that a fault and its end fit into seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.chaos_lab import ChaosLab, running_chaos
from tests.gateway.envoy_process import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

RATE = 40.0
FAULT_S = 3.0
SETTINGS: dict[str, Any] = {
    "scrape": {"interval": 0.5, "timeout": 0.5},
    "health": {"silence": 1.5, "open": 3, "max_open": 6, "max_backoff": 3, "probe_interval": 0.2},
    "decisions": {"ring": 2000},
    "logging": {"level": "info"},
}
ROWS: list[tuple[str, ...]] = []
HEAD = ("fault", "requests", "client errors", "sent to it", "avoided after", "back after")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosLab]:
    async with running_chaos(tmp_path_factory.mktemp("chaos"), SETTINGS) as running:
        yield running
    widths = [max(len(row[place]) for row in (HEAD, *ROWS)) for place in range(len(HEAD))]
    print()
    for row in (HEAD, *ROWS):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


@pytest_asyncio.fixture(loop_scope="module")
async def lab(module_lab: ChaosLab) -> ChaosLab:
    await module_lab.well()
    return module_lab


async def strike(
    lab: ChaosLab,
    name: str,
    begin: Callable[[], Awaitable[object]],
    end: Callable[[], Awaitable[object]],
    *,
    victim: str = "e1",
) -> Counter[str]:
    """Load, the fault, its end, a while after it; a row of the table. Returns what clients saw go wrong."""
    async with lab.load(RATE):
        await has_its_share(lab, victim)
        struck = time.time()
        await begin()
        await asyncio.sleep(FAULT_S)
        mended = time.time()
        await end()
        await has_its_share(lab, victim)
    await lab.gateway.extproc.idle()
    errors = lab.errors()
    avoided, back = await avoided_after(lab, victim, struck, mended), await back_after(lab, victim, mended)
    row(name, errors, len(lab.seen), avoided, back, await sent_to(lab, victim, struck, mended))
    return errors


async def has_its_share(lab: ChaosLab, victim: str, deadline_s: float = 8.0) -> None:
    """Wait until the victim is used, or for so long."""
    since = time.time()
    while time.time() < since + deadline_s and await back_after(lab, victim, since) is None:
        await asyncio.sleep(0.25)


def row(
    name: str,
    errors: Counter[str],
    count: int,
    avoided: float | None = None,
    back: float | None = None,
    sent: str = "-",
) -> None:
    said = ", ".join(f"{number} {word}" for word, number in errors.most_common()) or "none"
    ROWS.append((name, str(count), said, sent, _seconds(avoided), _seconds(back)))


async def sent_to(lab: ChaosLab, victim: str, struck: float, mended: float) -> str:
    """How many first choices of the fault's time fell on the victim, of how many."""
    places = [(at, chosen) for at, chosen in await lab.chosen() if struck <= at < mended]
    at_it = [at for at, chosen in places if chosen == victim]
    return f"{len(at_it)} of {len(places)}"


async def avoided_after(lab: ChaosLab, victim: str, struck: float, mended: float) -> float | None:
    """Seconds from ``struck`` to the last decision for the victim before half a second without any; None: none came.

    A quarter of 40 requests a second leaves such a gap by chance in less than one of a hundred cases.
    """
    last = struck
    for at in (at for at, chosen in await lab.chosen() if chosen == victim and struck <= at < mended):
        if at - last > 0.5:
            return last - struck
        last = at
    return last - struck if mended - last > 0.5 else None


async def back_after(lab: ChaosLab, victim: str, mended: float) -> float | None:
    """Seconds until the victim had a tenth of the decisions of a second; None: not yet."""
    places = [(at, chosen) for at, chosen in await lab.chosen() if at >= mended]
    window = int(RATE)
    for index in range(len(places) - window + 1):
        if sum(chosen == victim for _, chosen in places[index : index + window]) >= window / 10:
            return max(places[index][0] - mended, 0.0)
    return None


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


async def nothing() -> None:
    """Nothing is to be done."""


async def test_kill_9(lab: ChaosLab) -> None:
    e1 = lab.engines["e1"]
    errors = await strike(lab, "kill -9, started again", e1.kill, e1.start)
    # Only streams that it was sending are lost.
    assert set(errors) <= {"cut", "503"}
    assert sum(errors.values()) <= 15


async def test_refused_connections(lab: ChaosLab) -> None:
    errors = await strike(
        lab, "refuses connections", lambda: lab.fault("e1", refuse=True), lambda: lab.fault("e1")
    )
    assert set(errors) <= {"cut", "503"}
    assert sum(errors.values()) <= 15


async def test_hang(lab: ChaosLab) -> None:
    errors = await strike(lab, "hangs", lambda: lab.fault("e1", hang=True), lambda: lab.fault("e1"))
    assert set(errors) <= {"no answer"}
    assert sum(errors.values()) <= RATE * FAULT_S * 0.4


async def test_bursts_of_503(lab: ChaosLab) -> None:
    errors = await strike(lab, "503", lambda: lab.fault("e1", status=503), lambda: lab.fault("e1"))
    assert sum(errors.values()) <= 5


async def test_500s(lab: ChaosLab) -> None:
    errors = await strike(lab, "500", lambda: lab.fault("e1", status=500), lambda: lab.fault("e1"))
    assert set(errors) <= {"500"}
    assert sum(errors.values()) <= 20


async def test_streams_cut_in_the_middle(lab: ChaosLab) -> None:
    errors = await strike(lab, "cuts streams", lambda: lab.fault("e1", cut=2), lambda: lab.fault("e1"))
    assert set(errors) <= {"cut"}
    assert sum(errors.values()) <= 20


async def test_five_times_slower(lab: ChaosLab) -> None:
    """A slow engine is no dead one: it gets fewer requests while it is slow, and its share back."""
    async with lab.load(RATE):
        await has_its_share(lab, "e1")
        await asyncio.sleep(1)
        struck = time.time()
        await lab.fault("e1", slow=5)
        await asyncio.sleep(6)
        mended = time.time()
        await lab.fault("e1")
        await asyncio.sleep(5)
        ended = time.time()
    await lab.gateway.extproc.idle()
    places = await lab.chosen()

    def share(since: float, until_: float) -> float:
        of_then = [chosen for at, chosen in places if since <= at < until_]
        return of_then.count("e1") / len(of_then)

    before, slow, after = share(struck - 2, struck), share(struck + 2, mended), share(ended - 2.5, ended)
    back = await back_after(lab, "e1", mended)
    row(f"5x slower: share {before:.0%}, {slow:.0%}, {after:.0%}", lab.errors(), len(lab.seen), None, back)
    assert not lab.errors()
    assert slow < 0.8 * before
    assert after > slow


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("metrics frozen", "freeze_metrics"),
        ("metrics absent", "no_metrics"),
        ("metrics garbage", "garbage_metrics"),
    ],
)
async def test_metrics(lab: ChaosLab, name: str, switch: str) -> None:
    """Metrics that say nothing cost no client an answer, and shut nobody out."""
    async with lab.load(RATE):
        await asyncio.sleep(0.5)
        for engine in lab.engines:
            await lab.fault(engine, **{switch: True})
        struck = time.time()
        await asyncio.sleep(2.5)
    for engine in lab.engines:
        await lab.fault(engine)
    await lab.gateway.extproc.idle()
    places = Counter(chosen for at, chosen in await lab.chosen() if at >= struck)
    row(f"{name}, all engines", lab.errors(), len(lab.seen))
    assert not any(one["excluded"] for one in (await lab.gateway.extproc.fleet()).values())
    assert not lab.errors()
    assert len(places) > 1


async def test_extproc_killed(lab: ChaosLab) -> None:
    async with lab.load(RATE):
        await asyncio.sleep(1)
        struck = time.time()
        await lab.gateway.extproc.kill()
        await lab.gateway.restart_extproc()
        await lab.gateway.extproc.ready()
        restarted = time.time()
        await asyncio.sleep(2.5)
    errors = lab.errors()
    failed = [seen.at for seen in lab.seen if seen.error]
    last = max(failed, default=struck)
    row(f"extproc killed, back in {restarted - struck:.1f} s", errors, len(lab.seen), None, last - struck)
    assert set(errors) <= {"503"}
    assert last <= restarted + 2.0
    await lab.gateway.extproc.idle()


async def test_rolling_restart_of_all_engines_with_drain(lab: ChaosLab) -> None:
    """Each in turn: drain, wait, kill, start, undrain. No client hears of it."""

    async def operate(what: str, name: str, **more: object) -> dict[str, Any]:
        url = f"{lab.gateway.extproc.admin_url}/fleet/{what}"
        async with lab.session.post(url, json={"endpoint": name, **more}) as reply:
            assert reply.status == 200, await reply.text()
            return dict(await reply.json())

    async def is_ready(name: str) -> bool:
        return bool((await lab.gateway.extproc.fleet())[name]["lifecycle"] == "ready")

    began = time.time()
    async with lab.load(RATE):
        for name, engine in lab.engines.items():
            assert (await operate("drain", name, wait_s=10))["idle"]
            await engine.kill()
            await operate("undrain", name)
            assert not await is_ready(name), "it warms up until it answers"
            await engine.start()
            await until(lambda name=name: is_ready(name), 10, f"{name} is ready")
    await lab.gateway.extproc.idle()
    row("rolling restart of all four, drained", lab.errors(), len(lab.seen), None, time.time() - began)
    assert not lab.errors()
    assert {chosen for at, chosen in await lab.chosen() if at >= began} == set(lab.engines)


async def test_log_stream_cut(lab: ChaosLab) -> None:
    """Without the log extproc hears of no ending; requests are served all the same, and the leases whose endings were
    lost are closed by what the engines say that they run."""
    async with lab.load(RATE):
        await asyncio.sleep(1)
        await lab.relay.cut()

        async def deaf() -> bool:
            return await lab.gateway.extproc.total("extproc_log_streams") == 0

        await until(deaf, 5, "the metric says that nothing is heard")
        await asyncio.sleep(2)
        await lab.relay.open()
        opened = time.time()
        await asyncio.sleep(2)
    assert not lab.errors()
    assert await lab.gateway.extproc.total("extproc_log_streams") > 0
    left = await lab.gateway.extproc.total("extproc_leases")
    await lab.gateway.extproc.idle(20)
    row(
        f"log stream cut 2 s, {left:.0f} endings lost",
        lab.errors(),
        len(lab.seen),
        None,
        time.time() - opened,
    )
