"""A whole gateway for tests: ``extproc serve`` as a process of its own, and a real Envoy, before engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from extproc.edge.bootstrap import connection_manager
from extproc.edge.children import Child
from tests.gateway.echo_engine import EchoEngine, running_engine
from tests.gateway.envoy_process import Envoy, free_port, running_envoy, until


@dataclass(slots=True)
class Extproc:
    """A running ``extproc serve``."""

    directory: Path
    admin_port: int
    child: Child

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def log(self) -> str:
        return self.child.log.read_text(errors="replace")

    async def get(self, path: str) -> Any:
        """JSON of an admin page."""
        async with aiohttp.ClientSession() as session, session.get(self.admin_url + path) as reply:
            return json.loads(await reply.text())

    async def metrics(self) -> dict[str, float]:
        """Every sample by its name with labels, as written on the page."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.admin_url}/metrics") as reply:
            text = await reply.text()
        samples = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    async def total(self, name: str) -> float:
        """Sum of a metric over all its labels."""
        return sum(
            value
            for key, value in (await self.metrics()).items()
            if key == name or key.startswith(name + "{")
        )

    async def fleet(self) -> dict[str, dict[str, Any]]:
        """Endpoints by cluster name."""
        report = await self.get("/fleet")
        return {row["endpoint"].split("/")[0]: row for row in report["endpoints"]}

    async def ready(self, deadline_s: float = 15.0) -> None:
        """Wait until the admin page says ready."""

        async def answers() -> bool:
            assert self.child.alive, f"extproc ended:\n{self.child.tail(30)}"
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
                return bool((await self.get("/readyz"))["ready"])
            return False

        try:
            await until(answers, deadline_s, "extproc ready")
        except AssertionError as error:
            raise AssertionError(f"{error}; its log:\n{self.child.tail(30)}") from error

    async def rss_mb(self) -> float:
        """Resident memory of the process."""
        return (await self.metrics())["extproc_process_resident_memory_bytes"] / 2**20

    def send(self, number: signal.Signals) -> None:
        """A signal to extproc alone."""
        os.kill(self.child.process.pid, number)

    async def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.send(signal.SIGKILL)
        await self.child.process.wait()

    async def idle(self, deadline_s: float = 10.0) -> None:
        """Wait until no lease and no stream is open."""

        async def settled() -> bool:
            samples = await self.metrics()
            return not any(
                samples[f"extproc_{name}"] for name in ("leases", "streams_in_flight", "buffered_bytes")
            )

        await until(settled, deadline_s, "leases, streams and buffers back at zero")


@dataclass(slots=True)
class Gateway:
    """Envoy with extproc behind it. ``engines``: cluster name -> address."""

    envoy: Envoy
    extproc: Extproc
    directory: Path
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.envoy.url

    @property
    def clusters_file(self) -> Path:
        return self.directory / "clusters.yaml"

    @property
    def config_file(self) -> Path:
        return self.directory / "extproc.yaml"

    async def decides(self, deadline_s: float = 15.0) -> None:
        """Wait until extproc answers through Envoy. (Envoy's own word on its health is half a second old.)"""

        async def healthy() -> bool:
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}/health") as reply:
                return reply.status == 200

        await until(healthy, deadline_s, "extproc answers through Envoy")

    async def restart_extproc(self) -> None:
        """Start a new extproc where the last one was; it must be dead by now."""
        self.extproc = await _start_extproc(self.directory, self.extproc.admin_port)


def cluster(
    name: str, *addresses: str, pool: str = "pool", model: str = "m", **metadata: Any
) -> dict[str, Any]:
    """An engine cluster as a person would write it."""
    endpoints = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        endpoints.append(
            {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        )
    return {
        "name": name,
        "type": "STATIC",
        "metadata": {"filter_metadata": {"extproc": {"pool": pool, "model": model, **metadata}}},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def write_clusters(path: Path, clusters: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file in one step, as editors do."""
    temporary = path.with_suffix(".new")
    temporary.write_text(yaml.safe_dump({"resources": list(clusters)}, sort_keys=False))
    temporary.rename(path)


@contextlib.asynccontextmanager
async def running_extproc(
    directory: Path, clusters: Sequence[Mapping[str, Any]], settings: Mapping[str, Any] | None = None
) -> AsyncIterator[Extproc]:
    """extproc alone, for callers of its gRPC service on ``unix:live/p.sock``."""
    (directory / "live").mkdir()
    admin_port = free_port()
    merged = {
        "listen": {"grpc": "unix:live/p.sock", "admin": f"127.0.0.1:{admin_port}"},
        "envoy": {"clusters": "clusters.yaml", "live": "live", "admin": f"127.0.0.1:{free_port()}"},
        **(settings or {}),
    }
    (directory / "extproc.yaml").write_text(yaml.safe_dump(merged, sort_keys=False))
    write_clusters(directory / "clusters.yaml", clusters)
    extproc = await _start_extproc(directory, admin_port)
    try:
        await extproc.ready()
        yield extproc
    finally:
        await extproc.child.stop()


@contextlib.asynccontextmanager
async def running_gateway(
    directory: Path,
    clusters: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None,
    **envoy_options: Any,
) -> AsyncIterator[Gateway]:
    """Start extproc and Envoy in ``directory``, yield them when requests pass, stop both at the end.

    ``settings`` are merged over a minimal extproc.yaml; ``envoy_options`` go to ``running_envoy``.
    """
    live = directory / "live"
    live.mkdir()
    admin_port, envoy_admin_port = free_port(), free_port()
    merged: dict[str, Any] = {
        "envoy": {"clusters": "clusters.yaml", "live": "live", "admin": f"127.0.0.1:{envoy_admin_port}"},
        "logging": {"level": "debug"},
        **(settings or {}),
    }
    merged["listen"] = {
        "grpc": "unix:live/p.sock",
        "admin": f"127.0.0.1:{admin_port}",
        **merged.get("listen", {}),
    }
    (directory / "extproc.yaml").write_text(yaml.safe_dump(merged, sort_keys=False))
    write_clusters(directory / "clusters.yaml", clusters)
    extproc = await _start_extproc(directory, admin_port)
    gateway: Gateway | None = None
    try:
        await extproc.ready()
        async with running_envoy(
            directory,
            extproc_address=f"unix:{live / 'p.sock'}",
            live_dir=live,
            admin_port=envoy_admin_port,
            **envoy_options,
        ) as envoy:
            await envoy.healthy_processor()
            gateway = Gateway(envoy, extproc, directory, merged)
            yield gateway
    finally:
        await (gateway.extproc if gateway is not None else extproc).child.stop()


async def _start_extproc(directory: Path, admin_port: int) -> Extproc:
    command = [sys.executable, "-m", "extproc", "serve", "-c", str(directory / "extproc.yaml")]
    child = await Child.start("extproc", command, directory / "extproc.log", cwd=directory)
    return Extproc(directory, admin_port, child)


@dataclass(slots=True)
class Lab:
    """A gateway, the echo engines behind it by name, and a client."""

    gateway: Gateway
    engines: dict[str, EchoEngine]
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def extproc(self) -> Extproc:
        return self.gateway.extproc

    def __getitem__(self, name: str) -> EchoEngine:
        return self.engines[name]

    async def post(
        self, body: bytes | None = None, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of the answer. Underscores in header names stand for dashes."""
        named = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        data = chat() if body is None else body
        async with self.session.post(self.url + path, data=data, headers=named) as reply:
            return reply.status, reply.headers, await reply.read()

    async def settled(self) -> None:
        """Every lease closed and every endpoint taken to be well; engines answer plainly and forget."""
        for engine in self.engines.values():
            engine.reset()
        await self.extproc.idle()


@contextlib.asynccontextmanager
async def running_lab(
    directory: Path,
    engines: Sequence[str],
    clusters: Callable[[Mapping[str, EchoEngine]], Sequence[Mapping[str, Any]]] | None = None,
    settings: Mapping[str, Any] | None = None,
    **envoy_options: Any,
) -> AsyncIterator[Lab]:
    """A gateway before echo engines. ``clusters`` is made of them by name; default: one each, in one pool."""
    async with contextlib.AsyncExitStack() as stack:
        named = {name: await stack.enter_async_context(running_engine(name)) for name in engines}
        written = (
            clusters(named)
            if clusters is not None
            else [cluster(name, engine.address) for name, engine in named.items()]
        )
        gateway = await stack.enter_async_context(
            running_gateway(directory, written, settings, **envoy_options)
        )
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
            )
        )
        yield Lab(gateway, named, session)


def renew_every(seconds: float) -> Any:
    """For ``change=``: running requests renew their lease this often, not once a minute."""

    def change(document: dict[str, Any]) -> None:
        connection_manager(document)["access_log_options"] = {"access_log_flush_interval": f"{seconds}s"}

    return change


def chat(text: str = "hello", *, model: str | None = "m", **more: Any) -> bytes:
    """The body of a chat request."""
    named = {} if model is None else {"model": model}
    return json.dumps({**named, "messages": [{"role": "user", "content": text}], **more}).encode()


async def gather_bounded(count: int, at_once: int, work: Any) -> list[Any]:
    """``work(number)`` for every number, so many at once."""
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> Any:
        async with gate:
            return await work(number)

    return list(await asyncio.gather(*(one(number) for number in range(count))))
