"""Cache-aware routing before two real vLLM servers, by the openai package."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from extproc.engines.state import EngineState
from extproc.engines.vllm import VLLM
from tests.engine.vllm_server import MODEL, Vllm, running_vllm
from tests.gateway.gateway_process import Gateway, cluster, running_gateway

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

OURS, ROTATING = "expected-latency", "round-robin"
CHATS = 6
TURNS = 5
ROUNDS = 3
WORDS_A_TURN = 1500
"""About 1,570 tokens: the last prompt has 7,900 of the 8,192 that fit."""

_WORDS = (
    "river",
    "stone",
    "window",
    "morning",
    "paper",
    "garden",
    "letter",
    "winter",
    "market",
    "silver",
    "thunder",
)


@dataclass(slots=True)
class Turn:
    """One answer as its client saw it."""

    endpoint: str
    ttft_s: float
    prompt: int
    cached: int
    text: str


@dataclass(slots=True)
class Round:
    """All chats of one round under one strategy, and what the servers' own counters say of it."""

    strategy: str
    chats: list[list[Turn]] = field(default_factory=list)
    queries: float = 0.0
    hits: float = 0.0
    computed: float = 0.0

    @property
    def follow_ups(self) -> list[Turn]:
        return [turn for chat in self.chats for turn in chat[1:]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def vllms(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Vllm]]:
    """Two servers, started one after the other."""
    async with (
        running_vllm(tmp_path_factory.mktemp("one")) as one,
        running_vllm(tmp_path_factory.mktemp("two")) as two,
    ):
        yield [one, two]


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(vllms: list[Vllm], tmp_path: Path) -> AsyncIterator[Gateway]:
    clusters = [cluster(f"vllm-{number}", vllm.address, model=MODEL) for number, vllm in enumerate(vllms)]
    routes = [
        {"name": name, "match": {"header": {"X-Route": name}}, "pool": "pool", "strategy": name}
        for name in (OURS, ROTATING)
    ]
    settings = {"responses": {"headers": True}, "logging": {"level": "warning"}, "routes": routes}
    async with running_gateway(tmp_path, clusters, settings) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as openai:
        yield openai


def words(seed: str) -> str:
    """A text of its own for every seed."""
    start = sum(map(ord, seed))
    return f"{seed}: " + " ".join(_WORDS[(start + n * n + n // 7) % len(_WORDS)] for n in range(WORDS_A_TURN))


async def read(vllm: Vllm) -> EngineState:
    """Its metrics page as our adapter reads it."""
    async with aiohttp.ClientSession() as session, session.get(f"{vllm.url}/metrics") as reply:
        return VLLM.read(await reply.text(), 0.0)


async def ask(client: AsyncOpenAI, route: str, salt: str, said: list[dict[str, str]]) -> Turn:
    """One streamed answer."""
    began = time.perf_counter()
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=said,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=8,
        temperature=0,
        extra_headers={"X-Route": route},
        extra_body={"cache_salt": salt, "ignore_eos": True},
    )
    ttft, text, prompt, cached = None, "", 0, 0
    async for chunk in raw.parse():
        for choice in chunk.choices:
            if choice.delta.content and ttft is None:
                ttft = time.perf_counter() - began
            text += choice.delta.content or ""
        if chunk.usage is not None:
            prompt = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            cached = (details.cached_tokens if details is not None else None) or 0
    assert ttft is not None
    return Turn(raw.headers["x-gateway-endpoint"].partition("/")[0], ttft, prompt, cached, text)


async def chat(client: AsyncOpenAI, route: str, salt: str, name: str) -> list[Turn]:
    said = [{"role": "system", "content": "Answer shortly."}]
    turns = []
    for turn in range(TURNS):
        said.append({"role": "user", "content": words(f"{salt} {name} {turn}")})
        answer = await ask(client, route, salt, said)
        said.append({"role": "assistant", "content": answer.text})
        turns.append(answer)
    return turns


async def play(client: AsyncOpenAI, vllms: list[Vllm], strategy: str) -> Round:
    """So many chats side by side with a cache salt of their own: nothing of another round is found again."""
    salt, played = uuid4().hex, Round(strategy)
    before = [await read(vllm) for vllm in vllms]
    played.chats = list(
        await asyncio.gather(*(chat(client, strategy, salt, f"chat {number}") for number in range(CHATS)))
    )
    for vllm, old in zip(vllms, before, strict=True):
        new = await read(vllm)
        played.queries += (new.prefix_queries_total or 0) - (old.prefix_queries_total or 0)
        played.hits += (new.prefix_hits_total or 0) - (old.prefix_hits_total or 0)
        played.computed += (new.computed_prompt_tokens_total or 0) - (old.computed_prompt_tokens_total or 0)
    return played


def told(strategy: str, rounds: list[Round]) -> str:
    """The numbers in a line."""
    prompts = sum(turn.prompt for played in rounds for one in played.chats for turn in one)
    hits, computed = sum(played.hits for played in rounds), sum(played.computed for played in rounds)
    ttfts = [turn.ttft_s * 1e3 for played in rounds for turn in played.follow_ups]
    return (
        f"{strategy:>17}: prefix_cache_hits {hits:7.0f} of {prompts} prompt tokens ({hits / prompts:.0%}), computed "
        f"{computed:6.0f}; TTFT of follow-ups: median {statistics.median(ttfts):5.0f} ms, mean "
        f"{statistics.mean(ttfts):5.0f} ms, worst {max(ttfts):5.0f} ms"
    )


async def test_a_real_page_lacks_nothing_that_the_adapter_expects(vllms: list[Vllm]) -> None:
    for vllm in vllms:
        state = await read(vllm)
        assert VLLM.missing(state) == []
        assert state.kv_blocks
        assert state.computed_prompt_tokens_total is not None
        assert state.prefix_hits_total is not None
        assert state.started_at is not None


async def test_follow_ups_land_where_their_prefix_is_and_start_sooner_than_by_rotation(
    client: AsyncOpenAI, vllms: list[Vllm]
) -> None:
    for strategy in (OURS, ROTATING):  # the first requests of all compile and allocate
        await ask(client, strategy, uuid4().hex, [{"role": "user", "content": words("warm up")}])
    rounds = [await play(client, vllms, strategy) for strategy in (OURS, ROTATING) * ROUNDS]
    print()
    for played in rounds:
        print(told(played.strategy, [played]))
    ours = [played for played in rounds if played.strategy == OURS]
    rotating = [played for played in rounds if played.strategy == ROTATING]
    print(f"all {ROUNDS} rounds:\n{told(OURS, ours)}\n{told(ROTATING, rotating)}")
    for played in ours:
        at_home = [now.endpoint == before.endpoint for chat in played.chats for before, now in pairwise(chat)]
        assert sum(at_home) >= 0.8 * len(at_home), (
            "now and then waiting there costs more than computing it again"
        )
        assert len({chat[0].endpoint for chat in played.chats}) == 2, "and both servers work"
        cached = [turn.cached / turn.prompt for turn in played.follow_ups]
        assert statistics.median(cached) > 0.5
    assert sum(played.hits for played in ours) > 1.2 * sum(played.hits for played in rotating)
    assert sum(played.computed for played in ours) < 0.8 * sum(played.computed for played in rotating)
