"""Shadow traffic through a real Envoy: copies get an endpoint of their own, and the originals do not notice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.echo_engine import EchoEngine
from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Lab, chat, cluster, gather_bounded, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")


def clusters(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
    return [
        cluster("live", engines["live"].address),
        cluster("next", engines["next"].address, pool="next", model="m-next"),
    ]


SETTINGS = {
    "default_pool": "pool",
    "pools": {
        "pool": {
            "shadow": {
                "pool": "next",
                "percent": 100,
                "max_concurrent": 5,
                "rpm": 60_000,
                "max_duration": 1.0,
            }
        }
    },
    "health": {"failures": 10_000, "error_rate": 1.0},
    "responses": {"headers": True},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    directory: Path = tmp_path_factory.mktemp("shadow")
    async with running_lab(directory, ("live", "next"), clusters, SETTINGS) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def lab(module_lab: Lab) -> Lab:
    await module_lab.settled()
    return module_lab


async def shadow(lab: Lab) -> dict[str, Any]:
    (row,) = (await lab.extproc.get("/shadow"))["shadow"]
    return dict(row)


async def test_a_copy_is_decided_spliced_accounted_and_compared(lab: Lab) -> None:
    lab["live"].chunks = lab["next"].chunks = 3
    lab["next"].chunk_delay_s = 0.02
    before = await shadow(lab)

    async def one(_number: int) -> tuple[int, str]:
        status, headers, _ = await lab.post(chat(stream=True))
        return status, headers["x-engine"]

    for _ in range(10):
        assert await one(0) == (200, "live")
        await lab.extproc.idle()

    async def compared() -> bool:
        return bool((await shadow(lab))["compared"] - before["compared"] == 10)

    await until(compared, 5.0, "all copies ended and compared")
    row = await shadow(lab)
    assert row["original"]["ttft_s"] is not None
    assert row["copy"]["output_tokens"] == {"p50": 3.0, "p99": 3.0}
    assert row["ratio"]["duration"] > 1.0
    originals, copies = lab["live"].posts, lab["next"].posts
    assert [json.loads(item.body)["model"] for item in copies] == ["m-next"] * 10
    assert [item.body for item in originals] == [chat(stream=True)] * 10
    ids = [item.headers["x-gateway-request-id"] for item in originals]
    assert [item.headers["x-gateway-request-id"] for item in copies] == [f"{name}-shadow" for name in ids]
    assert not any(
        name.startswith("x-gateway-") for item in copies for name in item.headers if "id" not in name
    )
    assert await lab.extproc.total("extproc_records_odd_total") == 0


async def test_a_copy_that_hangs_or_fails_disturbs_nobody_and_is_ended(lab: Lab) -> None:
    lab["next"].gate = asyncio.Event()
    ended = lab["next"].aborted

    async def one(_number: int) -> tuple[int, str]:
        status, headers, _ = await lab.post()
        return status, headers["x-engine"]

    assert await gather_bounded(20, 10, one) == [(200, "live")] * 20
    row = await shadow(lab)
    assert row["running"] == 5, "no more than so many at once"
    assert row["skipped"]["concurrent"] >= 1
    await until(lambda: lab["next"].aborted - ended == 5, 5.0, "copies ended after their longest duration")
    await lab.extproc.idle()
    lab["next"].status = 500
    lab["next"].gate = None
    assert await one(0) == (200, "live")
    await lab.extproc.idle()


async def test_a_client_cannot_order_copies_or_reach_the_shadow(lab: Lab) -> None:
    other = chat(model="m-next")
    status, headers, _ = await lab.post(other, x_gateway_shadow="shadow", x_gateway_request_id="mine-shadow")
    assert (status, headers["x-engine"]) == (200, "next")
    await lab.extproc.idle()
    (received,) = lab["next"].posts
    assert not received.headers["x-gateway-request-id"].endswith("-shadow")


async def test_a_client_that_leaves_leaves_nothing_behind(lab: Lab) -> None:
    lab["live"].gate = asyncio.Event()
    running = asyncio.create_task(lab.post())
    await until(lambda: lab["live"].active == 1 and len(lab["next"].posts) == 1, 5.0, "both have begun")
    running.cancel()
    await until(lambda: lab["live"].active == 0, 5.0, "the original ended")
    await lab.extproc.idle()
    assert (await shadow(lab))["running"] == 0
