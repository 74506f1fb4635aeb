"""A gateway before simulated engines in this process, each with options of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from extproc.simulator.options import Options
from extproc.simulator.presets import PRESETS
from extproc.simulator.server import Handle, serve
from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Gateway, cluster, running_gateway

MODEL = "sim"


@dataclass(slots=True)
class SimFleet:
    """The gateway, its engines by cluster name, and a client."""

    gateway: Gateway
    engines: dict[str, Handle]
    session: aiohttp.ClientSession

    async def ask(
        self, text: str = "hello", *, headers: Mapping[str, str] | None = None, **body: Any
    ) -> tuple[int, str, dict[str, Any]]:
        """Status, the endpoint's cluster name, and the answer's JSON."""
        asked = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 4,
            **body,
        }
        url = f"{self.gateway.url}/v1/chat/completions"
        async with self.session.post(url, json=asked, headers=headers) as reply:
            place = reply.headers.get("x-gateway-endpoint", "").partition("/")[0]
            return reply.status, place, dict(json.loads(await reply.text()))

    def headers_seen(self, name: str) -> dict[str, str]:
        """Headers of the last request that the engine got."""
        return {key.lower(): value for key, value in self.engines[name].recorder.last(1)[0]["headers"]}


@contextlib.asynccontextmanager
async def running_fleet(
    directory: Path,
    engines: Mapping[str, tuple[Options, Mapping[str, Any]]],
    settings: Mapping[str, Any] | None = None,
    *,
    preset: str = "demo",
) -> AsyncIterator[SimFleet]:
    """Engines by cluster name: options of the simulator, and metadata of the cluster (``kv_events_port`` is put in
    where the engine publishes)."""
    async with contextlib.AsyncExitStack() as stack:
        handles: dict[str, Handle] = {}
        clusters = []
        for name, (options, metadata) in engines.items():
            handle = handles[name] = await serve(PRESETS[preset], MODEL, options=options)
            stack.push_async_callback(handle.stop)
            events = {} if handle.kv is None else {"kv_events_port": handle.kv.port}
            clusters.append(
                cluster(name, f"127.0.0.1:{handle.port}", **{"model": MODEL, **events, **metadata})
            )
        merged = {"responses": {"headers": True}, **(settings or {})}
        gateway = await stack.enter_async_context(running_gateway(directory, clusters, merged))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
        )
        fleet = SimFleet(gateway, handles, session)

        async def scraped() -> bool:
            return all(row["scrape_age_s"] is not None for row in (await gateway.extproc.fleet()).values())

        await until(scraped, 15, "first scrapes")
        yield fleet
