"""extproc hears what engines hold: real sockets, simulated engines, the whole subscriber."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from extproc.edge.kv_events import KvEvents
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.fleet.model_stats import ModelStats
from extproc.kvcache.approximate import ApproximateIndex
from extproc.kvcache.rank import State
from extproc.kvcache.token_chain import chain
from extproc.kvcache.view import CacheView
from extproc.simulator import tokens
from extproc.simulator.kv_wire import KvWire
from extproc.simulator.options import Options
from extproc.simulator.presets import PRESETS
from extproc.simulator.server import Handle, serve
from tests.gateway.envoy_process import free_port, until
from tests.gateway.sim_fleet import SimFleet, running_fleet

BLOCK = PRESETS["demo"].block_size


@dataclass(slots=True)
class Listener:
    """A subscriber over a table of endpoints, without the rest of the gateway."""

    endpoints: dict[str, Endpoint]
    view: CacheView
    events: KvEvents

    def add(self, engine: Handle, *, replay: bool = False, events_port: int | None = None) -> Endpoint:
        assert engine.kv is not None
        spec = EndpointSpec(
            f"e{len(self.endpoints)}",
            f"127.0.0.1:{engine.port}",
            "pool",
            kv_events_port=events_port or engine.kv.port,
            kv_replay_port=engine.kv.replay_port if replay else None,
        )
        endpoint = self.endpoints[spec.key] = Endpoint(spec, len(self.endpoints))
        return endpoint

    def held(self, endpoint: Endpoint, text: str) -> float:
        """Leading blocks of a completion's prompt that the endpoint holds, by its events."""
        packed = tokens.tokenise(tokens.text_pieces(text))
        return self.view.precise.match(chain(packed, seed=0, block_size=BLOCK)).get(endpoint.slot, 0)

    def state(self, endpoint: Endpoint) -> State | None:
        ranks = self.view.ranks.of(endpoint.slot)
        return ranks[0].state if 0 in ranks else None

    async def live(self, endpoint: Endpoint) -> None:
        await until(lambda: self.state(endpoint) is State.LIVE, 10, "live")


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    view = CacheView(ApproximateIndex(), ModelStats())
    endpoints: dict[str, Endpoint] = {}
    events = KvEvents(endpoints, view.ranks, replay_timeout_s=1.0)
    task = asyncio.create_task(events.run())
    try:
        yield Listener(endpoints, view, events)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def engine(
    wire: KvWire = KvWire.MAPS, port: int = 0, events: int = 0, replay: int = 0
) -> AsyncIterator[Handle]:
    options = Options(kv_events_port=events, kv_replay_port=replay, kv_wire=wire)
    handle = await serve(PRESETS["demo"], "m", port=port, options=options)
    try:
        yield handle
    finally:
        await handle.stop()


async def complete(handle: Handle, text: str) -> None:
    body = {"model": "m", "prompt": text, "max_tokens": 1}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{handle.port}/v1/completions", data=json.dumps(body)) as reply,
    ):
        assert reply.status == 200
        await reply.read()


def text(word: str, blocks: int) -> str:
    """A prompt of so many of the simulated engine's blocks."""
    return (word * (4 * BLOCK * blocks))[: 4 * BLOCK * blocks]


@pytest.mark.parametrize("wire", list(KvWire))
async def test_blocks_are_known_in_every_generation_of_the_wire(wire: KvWire) -> None:
    async with listening() as listener, engine(wire) as one:
        endpoint = listener.add(one)
        await listener.live(endpoint)
        await complete(one, text("abcd", 5))
        await until(lambda: listener.held(endpoint, text("abcd", 5)) == 5, 5, "five blocks")
        assert listener.view.precise.counts.undecodable == 0


async def test_an_engine_that_was_busy_before_we_came_is_replayed() -> None:
    async with engine() as one:
        await complete(one, text("abcd", 4))
        async with listening() as listener:
            endpoint = listener.add(one)
            await listener.live(endpoint)
            await until(lambda: listener.held(endpoint, text("abcd", 4)) == 4, 5, "replayed blocks")


async def test_a_restarted_engine_is_empty_and_followed_again() -> None:
    port, events, replay = free_port(), free_port(), free_port()
    async with listening() as listener:
        async with engine(port=port, events=events, replay=replay) as one:
            endpoint = listener.add(one)
            await listener.live(endpoint)
            await complete(one, text("abcd", 4))
            await until(lambda: listener.held(endpoint, text("abcd", 4)) == 4, 5, "blocks")
        async with engine(port=port, events=events, replay=replay) as two:
            await complete(two, text("wxyz", 3))
            await complete(two, text("stuv", 3))
            await until(
                lambda: (
                    listener.held(endpoint, text("wxyz", 3)) == 3
                    and listener.held(endpoint, text("abcd", 4)) == 0
                ),
                10,
                "the second life's blocks alone",
            )
            await listener.live(endpoint)


async def test_an_endpoint_that_leaves_takes_its_blocks_and_sockets_along() -> None:
    async with listening() as listener, engine() as one:
        endpoint = listener.add(one)
        await listener.live(endpoint)
        await complete(one, text("abcd", 4))
        await until(lambda: listener.view.precise.entries > 0, 5, "blocks")
        del listener.endpoints[endpoint.key]
        await until(lambda: len(listener.view.ranks) == 0, 5, "no ranks")
        while listener.view.precise.drain():
            pass
        assert listener.view.precise.entries == 0


async def test_a_port_where_nobody_publishes_leaves_the_endpoint_approximate() -> None:
    async with listening() as listener, engine() as one:
        spec = EndpointSpec(
            "dead", "127.0.0.1:1", "pool", kv_events_port=free_port(), kv_replay_port=free_port()
        )
        endpoint = listener.endpoints[spec.key] = Endpoint(spec, 7)
        await until(lambda: listener.state(endpoint) is State.WAITING, 5, "waiting after the replay failed")
        assert not listener.view.ranks.exact(7)
        other = listener.add(one)
        await listener.live(other)


async def foretold(fleet: SimFleet, tokens: list[int]) -> tuple[int, int]:
    """Tokens of a completion's prompt that were said to be cached, and that were, whole-gateway."""
    body = {"model": "sim", "prompt": tokens, "max_tokens": 1}
    url = f"{fleet.gateway.url}/v1/completions"
    async with fleet.session.post(url, json=body) as reply:
        assert reply.status == 200, await reply.text()
        usage = (await reply.json())["usage"]
        record = await fleet.gateway.extproc.get(f"/decisions/{reply.headers['x-gateway-request-id']}")
    return record["matched_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def exact(fleet: SimFleet) -> None:
    async def known() -> bool:
        metrics = await fleet.gateway.extproc.metrics()
        told = [value for name, value in metrics.items() if name.startswith("extproc_kv_events_exact{")]
        return len(told) == len(fleet.engines) and all(told)

    await until(known, 15, "every endpoint's events followed")


async def test_a_gateway_foretells_what_engines_find_also_after_its_own_restart(tmp_path: Path) -> None:
    rng = random.Random(4)
    shared = [rng.randrange(2**31) for _ in range(40 * BLOCK)]
    prompts = [shared[: rng.randrange(len(shared))] + [number] * 200 for number in range(12)]
    engines = {name: (Options(kv_events_port=0), {}) for name in ("a", "b")}
    async with running_fleet(tmp_path, engines) as fleet:
        await exact(fleet)
        for prompt in [*prompts, *prompts]:
            said, found = await foretold(fleet, prompt)
            assert said == found
        extproc = fleet.gateway.extproc
        messages = await extproc.total("extproc_kv_events_messages_total")
        assert messages > 0
        await extproc.kill()
        await fleet.gateway.restart_extproc()
        await fleet.gateway.extproc.ready()
        await fleet.gateway.decides()
        await exact(fleet)
        for prompt in prompts:
            said, found = await foretold(fleet, prompt)
            assert said == found > 0
