"""Four simulated engines as processes, steady load through the gateway, faults, and what became of the requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from extproc.edge.bootstrap import connection_manager
from extproc.edge.children import Child
from tests.gateway.envoy_process import free_port, until
from tests.gateway.gateway_process import Gateway, cluster, running_gateway

MODEL = "sim"
PATIENCE_S = 4.0
"""A client gives up after this."""


@dataclass(slots=True)
class Seen:
    """One request as its client saw it. ``error`` is empty when it got all of its answer."""

    at: float
    """Seconds, wall clock, when it was sent."""
    error: str = ""
    took_s: float = 0.0


class SimulatedEngine:
    """One engine: a process that can be killed and started again on the same port."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.port = free_port()
        self.control_port = free_port()
        self._directory = directory
        self._lives = 0
        self.child: Child | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        self._lives += 1
        command = [sys.executable, "-m", "extproc.simulator", "--model", MODEL, "--preset", "demo"]
        command += ["--port", str(self.port), "--control-port", str(self.control_port), "--chunk-tokens", "2"]
        log = self._directory / f"{self.name}-{self._lives}.log"
        self.child = await Child.start(self.name, command, log, cwd=self._directory)
        await self.child.wait_for_line("control on ", 30.0)

    async def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        assert self.child is not None
        os.kill(self.child.process.pid, signal.SIGKILL)
        await self.child.process.wait()

    async def stop(self) -> None:
        if self.child is not None:
            await self.child.stop()


class Relay:
    """A Unix socket before another one, which can be cut."""

    def __init__(self, path: Path, target: Path) -> None:
        self._path = path
        self._target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen, and pass bytes both ways."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def cut(self) -> None:
        """Close every connection and the socket."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there, back = await asyncio.open_unix_connection(self._target)
            await asyncio.gather(_pass(reader, back), _pass(there, writer))
        except (OSError, asyncio.CancelledError):
            pass  # a cut connection is the purpose
        finally:
            self._tasks.discard(task)
            writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def logs_by_relay(path: Path) -> Any:
    """For ``change=``: Envoy sends its access logs by the socket ``path``, apart from its questions."""

    def change(document: dict[str, Any]) -> None:
        clusters = document["static_resources"]["clusters"]
        processor = next(one for one in clusters if one["name"] == "extproc")
        relayed = json.loads(json.dumps(processor))
        relayed["name"] = "extproc-log"
        relayed.pop("health_checks", None)
        relayed["load_assignment"]["cluster_name"] = "extproc-log"
        endpoint = relayed["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
        endpoint["address"] = {"pipe": {"path": str(path)}}
        clusters.append(relayed)
        _point_logs(connection_manager(document))

    return change


def _point_logs(node: Any) -> None:
    if isinstance(node, dict):
        if "log_name" in node:
            node["grpc_service"]["envoy_grpc"]["cluster_name"] = "extproc-log"
        for value in node.values():
            _point_logs(value)
    elif isinstance(node, list):
        for value in node:
            _point_logs(value)


@dataclass(slots=True)
class ChaosLab:
    """The gateway, its engines and the load on it."""

    gateway: Gateway
    engines: dict[str, SimulatedEngine]
    session: aiohttp.ClientSession
    relay: Relay
    seen: list[Seen] = field(default_factory=list)
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _number: int = 0

    async def fault(self, name: str, **switches: Any) -> None:
        """Switch faults of one engine; none: all off."""
        url = f"http://127.0.0.1:{self.engines[name].control_port}/_sim/faults"
        async with self.session.delete(url) as reply:
            assert reply.status == 200
        if switches:
            async with self.session.post(url, json=switches) as reply:
                assert reply.status == 200, await reply.text()

    @contextlib.asynccontextmanager
    async def load(self, rate: float) -> AsyncIterator[None]:
        """So many requests a second while the block runs; at its end all have ended. ``seen`` begins empty."""
        self.seen.clear()
        source = asyncio.create_task(self._send(rate))
        try:
            yield
        finally:
            source.cancel()
            await asyncio.gather(source, return_exceptions=True)
            await asyncio.gather(*self._running)

    async def _send(self, rate: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            task = asyncio.create_task(self._one())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            due = max(due + 1 / rate, loop.time() - 0.5)
            await asyncio.sleep(due - loop.time())

    async def _one(self) -> None:
        self._number += 1
        seen = Seen(time.time())
        self.seen.append(seen)
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"request {self._number}: " + "x" * 120}],
            "stream": True,
            "max_tokens": 12,
        }
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                async with self.session.post(f"{self.gateway.url}/v1/chat/completions", json=body) as reply:
                    text = await reply.read()
                    if reply.status != 200:
                        seen.error = f"{reply.status}"
                    elif not text.rstrip().endswith(b"data: [DONE]"):
                        seen.error = "cut"
        except TimeoutError:
            seen.error = "no answer"
        except aiohttp.ClientPayloadError:
            seen.error = "cut"
        except (aiohttp.ClientError, OSError) as error:
            seen.error = type(error).__name__
        seen.took_s = time.monotonic() - began

    def errors(self) -> Counter[str]:
        """What clients saw go wrong."""
        return Counter(seen.error for seen in self.seen if seen.error)

    async def chosen(self) -> list[tuple[float, str]]:
        """``(when, cluster)`` of the newest decisions, oldest first."""
        newest = (await self.gateway.extproc.get("/decisions?count=1000"))["decisions"]
        return [
            (record["at"], str(record["chosen"]).partition("/")[0])
            for record in reversed(newest)
            if record["chosen"]
        ]

    async def well(self) -> None:
        """Every engine works and is trusted, and nothing is open."""
        for name in self.engines:
            await self.fault(name)

        async def trusted() -> bool:
            fleet = await self.gateway.extproc.fleet()
            return all(row["circuit"] != "open" and row["lifecycle"] == "ready" for row in fleet.values())

        await until(trusted, 20, "every circuit may be tried")
        await self.gateway.extproc.idle()


@contextlib.asynccontextmanager
async def running_chaos(directory: Path, settings: Mapping[str, Any]) -> AsyncIterator[ChaosLab]:
    """Four engines in one pool."""
    engines = {name: SimulatedEngine(name, directory) for name in ("e1", "e2", "e3", "e4")}
    try:
        await asyncio.gather(*(engine.start() for engine in engines.values()))
        clusters = [cluster(name, engine.address, model=MODEL) for name, engine in engines.items()]
        socket = directory / "live" / "log.sock"
        relay = Relay(socket, directory / "live" / "p.sock")
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            running_gateway(directory, clusters, settings, change=logs_by_relay(socket)) as gateway,
            aiohttp.ClientSession(connector=connector) as session,
        ):
            await relay.open()
            try:
                yield ChaosLab(gateway, engines, session, relay)
            finally:
                await relay.cut()
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines.values()))
