"""A smaller model answers when the one asked for cannot in time, and the client is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.gateway.echo_engine import EchoEngine
from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import chat, cluster, running_lab
from tests.gateway.test_tenants import sha


def big_and_small(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
    return [
        cluster("big", engines["big"].address, pool="big", model="m-big", max_concurrency=1),
        cluster("small", engines["small"].address, pool="small", model="m-small"),
    ]


SETTINGS: dict[str, Any] = {"pools": {"big": {"fallback_pool": "small"}}}


async def test_a_full_pool_falls_back_to_the_smaller_model(tmp_path: Path) -> None:
    async with running_lab(tmp_path, ["big", "small"], big_and_small, SETTINGS) as lab:
        lab["big"].gate = asyncio.Event()
        first = asyncio.create_task(lab.post(chat(model="m-big")))
        await until(lambda: lab["big"].active == 1, 5, "the first runs")
        body = chat("hello", model="m-big", temperature=0.25)
        status, headers, _ = await lab.post(body)
        assert (status, headers["x-engine"], headers["x-gateway-fallback"]) == (200, "small", "m-small")
        assert lab["small"].posts[0].body == body.replace(b'"m-big"', b'"m-small"')
        lab["big"].gate.set()
        status, headers, _ = await first
        assert (status, headers["x-engine"]) == (200, "big")
        assert "x-gateway-fallback" not in headers


async def test_a_tenant_that_does_not_want_it_waits(tmp_path: Path) -> None:
    settings = {**SETTINGS, "tenants": {"a": {"keys": [sha("a")], "fallback": False}}}
    async with running_lab(tmp_path, ["big", "small"], big_and_small, settings) as lab:
        lab["big"].gate = asyncio.Event()
        tasks = [asyncio.create_task(lab.post(chat(model="m-big"), x_api_key="a")) for _ in range(2)]

        async def waits() -> bool:
            return await lab.extproc.total("extproc_queue_requests") == 1

        await until(waits, 5, "one waits")
        lab["big"].gate.set()
        answers = await asyncio.gather(*tasks)
        assert [headers["x-engine"] for _, headers, _ in answers] == ["big", "big"]


async def test_engines_that_fail_together_open_the_circuit(tmp_path: Path) -> None:
    """Without a fallback clients hear 503 at once; with one it answers."""
    async with running_lab(tmp_path, ["big", "small"], big_and_small) as lab:
        lab["big"].status = 500
        for _ in range(25):
            await lab.post(chat(model="m-big"))
            await lab.extproc.idle()
        status, headers, body = await lab.post(chat(model="m-big"))
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_capacity")
        assert int(headers["retry-after"]) >= 1
        assert lab["big"].begun <= 25
