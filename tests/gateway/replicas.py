"""A gateway before simulated engines, each a process of its own, and what tests ask of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from extproc.edge.children import Child
from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Extproc, Gateway, cluster, running_gateway

MODEL = "sim"


@dataclass(slots=True, frozen=True)
class Answer:
    """What a client got. ``endpoint`` is the cluster's name."""

    status: int
    id: str
    endpoint: str
    text: str
    usage: Mapping[str, Any]

    @property
    def cached(self) -> int:
        """Prompt tokens the engine found in its cache, as it reported."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


@dataclass(slots=True)
class Replicas:
    """The gateway, the engines' addresses by cluster name, and a client."""

    gateway: Gateway
    addresses: dict[str, str]
    session: aiohttp.ClientSession
    answers: list[Answer] = field(default_factory=list)
    unanswered: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(100))
    """Bounds requests whose response headers have not come, not those that run: hundreds of requests in one instant
    measure how starved a small machine is."""

    @property
    def extproc(self) -> Extproc:
        return self.gateway.extproc

    async def ask(
        self,
        messages: Sequence[Mapping[str, str]] | str,
        *,
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> Answer:
        """A streamed chat request to its end."""
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        asked = {
            "model": MODEL,
            "messages": said,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 8,
            **body,
        }
        async with self.unanswered:
            reply = await self.session.post(
                f"{self.gateway.url}/v1/chat/completions", json=asked, headers=headers
            )
        async with reply:
            raw = await reply.read()
            text, usage = _streamed(raw) if reply.status == 200 else (raw.decode(), {})
            place = reply.headers.get("x-gateway-endpoint", "")
            answer = Answer(
                reply.status,
                reply.headers.get("x-gateway-request-id", ""),
                place.partition("/")[0],
                text,
                usage,
            )
        self.answers.append(answer)
        return answer

    async def together(self, prompts: Iterable[Any], **body: Any) -> list[Answer]:
        """All at once."""
        return list(await asyncio.gather(*(self.ask(prompt, **body) for prompt in prompts)))

    async def decision(self, answer: Answer) -> dict[str, Any]:
        """The record behind an answer."""
        record: dict[str, Any] = await self.extproc.get(f"/decisions/{answer.id}")
        return record

    async def fault(self, name: str, **switches: Any) -> None:
        """Switch faults of one engine."""
        async with self.session.post(f"http://{self.addresses[name]}/_sim/faults", json=switches) as reply:
            assert reply.status == 200, await reply.text()

    async def scraped(self) -> None:
        """Wait until every engine's metrics have been read."""

        async def known() -> bool:
            return all(row["scrape_age_s"] is not None for row in (await self.extproc.fleet()).values())

        await until(known, 10.0, "first scrapes")


def spread(answers: Iterable[Answer]) -> Counter[str]:
    """Requests by endpoint."""
    return Counter(answer.endpoint for answer in answers)


def tokens(count: int, seed: str) -> str:
    """Text of about so many tokens (four bytes each), unlike any text of another seed."""
    unit = f"{seed} says "
    return (unit * (count * 4 // len(unit) + 1))[: count * 4]


def _streamed(raw: bytes) -> tuple[str, dict[str, Any]]:
    text, usage = [], {}
    for line in raw.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        usage = event.get("usage") or usage
        text += [choice["delta"].get("content") or "" for choice in event.get("choices", ())]
    return "".join(text), usage


@contextlib.asynccontextmanager
async def running_replicas(
    directory: Path,
    engines: int | Mapping[str, Mapping[str, Any]],
    *flags: str,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[Replicas]:
    """So many engines in one pool, or engines by cluster name with their metadata. ``flags`` go to each simulator."""
    wanted = {f"replica-{number}": {} for number in range(engines)} if isinstance(engines, int) else engines
    children: list[Child] = []
    try:
        for name in wanted:
            command = [sys.executable, "-m", "extproc.simulator", "--model", MODEL, *flags]
            children.append(await Child.start(name, command, directory / f"{name}.log", cwd=directory))
        addresses = {
            child.name: (await child.wait_for_line("listening on ", 30.0)).split()[2] for child in children
        }
        clusters = [
            cluster(name, addresses[name], **{"model": MODEL, **metadata})
            for name, metadata in wanted.items()
        ]
        merged = {"responses": {"headers": True}, "logging": {"level": "warning"}, **(settings or {})}
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            running_gateway(directory, clusters, merged) as gateway,
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session,
        ):
            replicas = Replicas(gateway, addresses, session)
            await replicas.scraped()
            yield replicas
    finally:
        await asyncio.gather(*(child.stop() for child in children))
