"""What we say a real vLLM holds, and what it says itself (``cached_tokens`` of every answer).

A core and its subscriber run in this process; requests go straight to the engine. Every request is predicted twice: by
the engine's KV events and exact tokens, and by the approximate index that knows only what was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.api.parse import parse
from extproc.api.request import Api, RequestHead
from extproc.edge.kv_events import KvEvents
from extproc.edge.tokenizer_files import ModelTokenizer, load
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.fleet.model_stats import ModelStats
from extproc.kvcache.approximate import ApproximateIndex
from extproc.kvcache.view import CacheView, Look
from tests.engine.vllm_server import BLOCK, MODEL, Vllm, running_vllm
from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import cluster, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOM = 600
"""KV blocks of the engine: 19,200 tokens."""


@dataclass(slots=True)
class Prediction:
    """Tokens of one prompt that are cached: by events, by what was sent, by the engine's own word."""

    precise: int
    approximate: int
    actual: int
    prompt: int


@dataclass(slots=True)
class Watcher:
    """Our view of one engine."""

    engine: Vllm
    tokenizer: ModelTokenizer
    view: CacheView
    endpoint: Endpoint
    seen: list[Prediction] = field(default_factory=list)

    async def ask(self, messages: list[dict[str, str]], max_tokens: int = 8) -> str:
        """Send one chat request; remember what was foretold and what came."""
        body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        look = await self.look(body)
        precise = self.view.held(self.endpoint, look)
        approximate = look.tokens(self.view.index.expect_of(self.endpoint.slot, look.hashes))
        claim = self.view.claim(self.endpoint, look)
        try:
            answer = await self.engine.post("/v1/chat/completions", body)
        finally:
            claim.keep()
        usage = answer["usage"]
        assert usage["prompt_tokens"] == look.prompt_tokens
        self.view.answered(self.endpoint, look, usage["completion_tokens"])
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.seen.append(Prediction(precise, approximate, cached, look.prompt_tokens))
        return str(answer["choices"][0]["message"]["content"] or "")

    async def look(self, body: dict[str, Any]) -> Look:
        """A request as the gateway sees it."""
        raw = json.dumps(body).encode()
        head = RequestHead("id", "POST", "/v1/chat/completions", "", {"content-type": "application/json"})
        request = parse(head, raw)
        request.prompt.tokens = await asyncio.to_thread(self.tokenizer.tokens, Api.CHAT, raw)
        return self.view.look(request.prompt, MODEL)

    def exact(self) -> bool:
        return self.view.ranks.exact(self.endpoint.slot)

    def quiet(self) -> bool:
        """Every event published so far is taken, as far as we have heard."""
        return self.exact() and all(not rank.behind for _, _, rank in self.view.ranks)


@contextlib.asynccontextmanager
async def watching(engine: Vllm) -> AsyncIterator[Watcher]:
    """Subscribe; the declared port alone, the rest is for the engine to tell."""
    view = CacheView(ApproximateIndex(), ModelStats(), seed=11)
    spec = EndpointSpec("vllm", engine.address, "pool", kv_events_port=engine.events_port)
    endpoint = Endpoint(spec, 0)
    view.index.resize(0, ROOM * BLOCK * 4 // 256)
    events = KvEvents({spec.key: endpoint}, view.ranks)
    task = asyncio.create_task(events.run())
    try:
        watcher = Watcher(engine, load(engine.folder / "model", max_tokens=1_000_000), view, endpoint)
        await until(watcher.exact, 20, "the engine's events followed")
        yield watcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Vllm]:
    """An engine with a small cache."""
    work = tmp_path_factory.mktemp("vllm")
    async with running_vllm(work, "--num-gpu-blocks-override", str(ROOM)) as server:
        yield server


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(("alpha", "beta", "gamma", "delta", "omega", "42", "x")) for _ in range(count))


Step = Callable[[], Awaitable[None]]


def conversations(
    watcher: Watcher, rng: random.Random, count: int, turns: int, size: int
) -> list[list[Step]]:
    """Steps of several conversations; some share their system prompt."""
    systems = [f"System {number}. " + words(rng, 120) for number in range(3)]
    found = []
    for number in range(count):
        messages = [{"role": "system", "content": systems[number % len(systems)]}]

        async def step(messages: list[dict[str, str]] = messages, number: int = number) -> None:
            turn = len(messages) // 2
            said = f"c{number} t{turn} " + words(rng, rng.randint(5, size))
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": await watcher.ask(messages)})

        found.append([step] * turns)
    return found


def report(name: str, seen: list[Prediction]) -> dict[str, float]:
    """Print and return the error distributions."""
    shares: dict[str, float] = {}
    for kind in ("precise", "approximate"):
        errors = sorted(abs(getattr(one, kind) - one.actual) for one in seen)
        exact = sum(error == 0 for error in errors) / len(errors)
        block = sum(error < BLOCK for error in errors) / len(errors)
        over = sum(max(getattr(one, kind) - one.actual, 0) for one in seen)
        shares[kind], shares[f"{kind} within a block"] = exact, block
        print(
            f"\n{name}: {kind}: n={len(seen)} exact={exact:.1%} within a block={block:.1%} "
            f"p50={errors[len(errors) // 2]} p90={errors[int(len(errors) * 0.9)]} max={errors[-1]} tokens, "
            f"promised too much={over} of {sum(one.prompt for one in seen)}",
            end="",
        )
    return shares


async def test_mixed_conversations_are_foretold_exactly(vllm: Vllm) -> None:
    async with watching(vllm) as watcher:
        rng = random.Random(5)
        steps = conversations(watcher, rng, 12, 4, 60)
        order = [number for number, turns in enumerate(steps) for _ in turns]
        rng.shuffle(order)
        hits = await vllm.metric("vllm:prefix_cache_hits_total")
        for number in order:
            await steps[number].pop()()
            await until(watcher.quiet, 5, "events taken")
        shares = report("one at a time", watcher.seen)
        assert shares["precise"] >= 0.99
        assert (
            sum(one.actual for one in watcher.seen)
            == await vllm.metric("vllm:prefix_cache_hits_total") - hits
        )


async def test_with_requests_in_flight_the_error_is_what_is_in_flight(vllm: Vllm) -> None:
    async with watching(vllm) as watcher:
        rng = random.Random(6)
        steps = conversations(watcher, rng, 12, 4, 60)

        async def talk(turns: list[Step]) -> None:
            for step in turns:
                await step()
                await asyncio.sleep(rng.random() * 0.05)

        gate = asyncio.Semaphore(4)

        async def one(turns: list[Step]) -> None:
            async with gate:
                await talk(turns)

        await asyncio.gather(*(one(turns) for turns in steps))
        shares = report("four at a time", watcher.seen)
        assert shares["precise"] >= 0.98
        assert shares["precise"] >= shares["approximate"]


async def test_a_full_cache_evicts_and_only_events_tell(vllm: Vllm) -> None:
    async with watching(vllm) as watcher:
        rng = random.Random(7)
        prompts = [[{"role": "user", "content": f"p{number} " + words(rng, 700)}] for number in range(30)]
        for prompt in prompts:
            await watcher.ask(prompt)
        for prompt in rng.choices(prompts, k=40):
            await until(watcher.quiet, 5, "events taken")
            await watcher.ask(prompt)
        seen = watcher.seen[len(prompts) :]
        assert {one.actual > 0 for one in seen} == {True, False}
        shares = report("more prompts than fit", seen)
        assert shares["precise"] >= 0.99
        assert shares["approximate within a block"] < shares["precise"]
        assert watcher.view.precise.counts.removed > 0
        # Somebody else fills the cache past us.
        await watcher.ask(prompts[0])
        for number in range(30):
            foreign = [{"role": "user", "content": f"other{number} " + words(rng, 700)}]
            await vllm.post("/v1/chat/completions", {"model": MODEL, "messages": foreign, "max_tokens": 1})
        look = await watcher.look({"model": MODEL, "messages": prompts[0]})
        await until(lambda: watcher.view.held(watcher.endpoint, look) == 0, 5, "the eviction told")
        await watcher.ask(prompts[0])
        assert watcher.seen[-1].precise == watcher.seen[-1].actual == 0 < watcher.seen[-1].approximate


async def test_the_whole_gateway_counts_and_matches_as_the_engine_does(vllm: Vllm, tmp_path: Path) -> None:
    clusters = [cluster("vllm", vllm.address, model=MODEL, kv_events_port=vllm.events_port)]
    settings = {
        "pools": {"pool": {"tokenizer": str(vllm.folder / "model")}},
        "tokenizers": {"deadline": 5},
        "responses": {"headers": True},
    }
    async with running_gateway(tmp_path, clusters, settings) as gateway, aiohttp.ClientSession() as session:

        async def ready() -> bool:
            metrics = await gateway.extproc.metrics()
            return any(
                value for name, value in metrics.items() if name.startswith("extproc_kv_events_exact{")
            )

        await until(ready, 20, "the engine's events followed")
        messages = [{"role": "system", "content": "Be brief. " * 40}]
        differences = []
        for turn in range(6):
            messages.append({"role": "user", "content": f"Question {turn}, " + "please " * 30})
            body = {"model": MODEL, "messages": messages, "max_tokens": 8}
            async with session.post(f"{gateway.url}/v1/chat/completions", json=body) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
                request_id = reply.headers["x-gateway-request-id"]
            record = await gateway.extproc.get(f"/decisions/{request_id}")
            usage = answer["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if (record["prompt_tokens"], record["matched_tokens"]) != (usage["prompt_tokens"], cached):
                differences.append((turn, record["prompt_tokens"], record["matched_tokens"], usage))
            messages.append(
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""}
            )
        # The first request may come before the tokenizer is loaded.
        assert [one for one in differences if one[0]] == []
        assert cached > 0


async def test_a_new_extproc_learns_what_the_engine_holds(vllm: Vllm) -> None:
    prompt = [{"role": "user", "content": "Remember me. " * 60}]
    async with watching(vllm) as watcher:
        await watcher.ask(prompt)
    async with watching(vllm) as watcher:
        await until(watcher.quiet, 10, "the replay taken")
        await watcher.ask(prompt)
        assert watcher.seen[0].precise == watcher.seen[0].actual > 0
        assert watcher.seen[0].approximate == 0


async def test_a_restarted_replica_is_empty_and_followed_again(vllm: Vllm) -> None:
    async with watching(vllm) as watcher:
        prompt: list[dict[str, Any]] = [{"role": "user", "content": "Before the restart. " * 60}]
        await watcher.ask(prompt)
        await vllm.restart()
        await watcher.ask([{"role": "user", "content": "After it. " * 60}])
        await until(
            lambda: watcher.quiet() and watcher.view.ranks.counts.restarts > 0, 20, "the restart noticed"
        )
        for _ in range(2):
            await watcher.ask(prompt)
            await until(watcher.quiet, 5, "events taken")
        last = watcher.seen[-2:]
        assert [one.precise for one in last] == [one.actual for one in last]
        assert last[0].actual == 0 < last[1].actual
        assert last[0].approximate > 0
