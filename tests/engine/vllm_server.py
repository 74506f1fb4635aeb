"""Real vLLM servers for tests: where they are installed, and how one is started and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from extproc.edge.children import Child
from tests.gateway.envoy_process import free_port

MODEL = "tiny"
BLOCK = 32
"""The CPU backend takes blocks of 32 tokens and multiples."""


def installed() -> Path | None:
    """The folder that ``install_vllm.sh`` filled: ``VLLM_DIR``, or ``.vllm`` in the repository; None: not there."""
    folder = Path(os.environ.get("VLLM_DIR") or Path(__file__).parents[2] / ".vllm")
    return (
        folder
        if (folder / "model" / "config.json").exists() and (folder / "venv/bin/vllm").exists()
        else None
    )


@dataclass(slots=True)
class Vllm:
    """One running server. Ports stay the same over :meth:`restart`."""

    folder: Path
    work: Path
    port: int
    events_port: int
    replay_port: int
    flags: Sequence[str]
    cache_gib: str
    child: Child | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, deadline_s: float = 240.0) -> None:
        """Start and wait until it serves; about 45 s."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": f"kv@{self.address}@{MODEL}",
        }
        command = [
            *("env", "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "OMP_NUM_THREADS=1"),
            *("VLLM_CPU_OMP_THREADS_BIND=nobind", f"VLLM_CPU_KVCACHE_SPACE={self.cache_gib}"),
            *(str(self.folder / "venv/bin/python"), str(self.folder / "venv/bin/vllm"), "serve"),
            *(str(self.folder / "model"), "--served-model-name", MODEL, "--load-format", "dummy"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"),
            *("--max-model-len", "8192", "--max-num-seqs", "16", "--block-size", str(BLOCK)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--kv-events-config", json.dumps(events), *self.flags),
        ]
        self.child = await Child.start("vllm", command, self.work / f"vllm-{self.port}.log")
        end = asyncio.get_running_loop().time() + deadline_s
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with session.get(f"{self.url}/health") as reply:
                        if reply.status == 200:
                            return
                if not self.child.alive or asyncio.get_running_loop().time() > end:
                    raise AssertionError(f"vLLM did not start:\n{self.child.tail(40)}")
                await asyncio.sleep(0.5)

    async def stop(self) -> None:
        """Stop it and everything it started."""
        if self.child is not None:
            await self.child.stop(20.0)
            self.child = None

    async def restart(self) -> None:
        """A new process at the same ports."""
        await self.stop()
        await self.start()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A JSON answer of status 200."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
            session.post(self.url + path, json=body) as reply,
        ):
            text = await reply.text()
            assert reply.status == 200, text
            return dict(json.loads(text))

    async def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)


@contextlib.asynccontextmanager
async def running_vllm(work: Path, *flags: str, cache_gib: str = "1") -> AsyncIterator[Vllm]:
    """A server that serves when yielded and is gone afterwards."""
    folder = installed()
    assert folder is not None
    server = Vllm(folder, work, free_port(), free_port(), free_port(), flags, cache_gib)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()
