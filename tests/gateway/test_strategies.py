"""Every strategy through a real Envoy, one route each, as platform teams write them in extproc.yaml."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from extproc.scheduling.registry import NAMES
from tests.gateway.envoy_process import until
from tests.gateway.replicas import Answer, Replicas, running_replicas, spread, tokens

ENGINES = {
    "red": {"version": "v1", "weight": 2},
    "green": {"version": "v1", "weight": 1},
    "blue": {"version": "v2", "weight": 1},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "weighted-split": {"weights": {"v1": 1, "v2": 3}},
    "weighted-score": {"weights": {"cache": 0.7, "load": 0.3}},
}


def _route(name: str) -> dict[str, Any]:
    route: dict[str, Any] = {
        "name": name,
        "match": {"header": {"X-Route": name}},
        "pool": "pool",
        "strategy": name,
    }
    return {**route, "options": OPTIONS[name]} if name in OPTIONS else route


def _settings() -> dict[str, Any]:
    canary = {
        "name": "canary",
        "match": {"header": {"X-Route": "canary"}},
        "pool": "pool",
        "strategy": "least-requests",
        "weights": {"v1": 90, "v2": 10},
    }
    return {"routes": [*map(_route, sorted(NAMES)), canary]}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replicas]:
    directory: Path = tmp_path_factory.mktemp("strategies")
    async with running_replicas(directory, ENGINES, settings=_settings()) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def ask(replicas: Replicas, route: str, text: str = "hello", **headers: str) -> Answer:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    answer = await replicas.ask(text, headers={"X-Route": route, **named}, max_tokens=4)
    assert answer.status == 200
    return answer


async def in_turn(replicas: Replicas, route: str, count: int, **headers: str) -> list[str]:
    return [(await ask(replicas, route, f"{route} {number}", **headers)).endpoint for number in range(count)]


async def at_once(replicas: Replicas, route: str, count: int) -> Counter[str]:
    return spread(
        await asyncio.gather(*(ask(replicas, route, f"{route} {number}") for number in range(count)))
    )


@pytest.mark.parametrize("name", sorted(NAMES))
async def test_it_serves_and_its_record_names_what_it_looked_at(replicas: Replicas, name: str) -> None:
    record = await replicas.decision(await ask(replicas, name))
    assert (record["route"], record["strategy"]) == (name, name)
    assert record["terms"]
    assert len(record["candidates"]) == 3
    assert all(len(row["terms"]) == len(record["terms"]) for row in record["candidates"])
    assert record["chosen"] == record["candidates"][0]["endpoint"]


async def test_round_robin_takes_turns(replicas: Replicas) -> None:
    order = await in_turn(replicas, "round-robin", 9)
    assert set(order[:3]) == set(ENGINES)
    assert order == order[:3] * 3


async def test_weighted_round_robin_gives_turns_by_weight(replicas: Replicas) -> None:
    assert Counter(await in_turn(replicas, "weighted-round-robin", 12)) == {"red": 6, "green": 3, "blue": 3}


async def test_least_requests_fills_by_weight(replicas: Replicas) -> None:
    counts = await at_once(replicas, "least-requests", 24)
    assert abs(counts["red"] - 12) <= 3
    assert abs(counts["green"] - 6) <= 2
    assert abs(counts["blue"] - 6) <= 2


@pytest.mark.parametrize("name", ["power-of-two-choices", "random", "locality"])
async def test_requests_at_once_use_every_endpoint(replicas: Replicas, name: str) -> None:
    assert set(await at_once(replicas, name, 30)) == set(ENGINES)


@pytest.mark.parametrize("name", ["latency", "throughput", "adaptive"])
async def test_strategies_that_learn_do_not_run_to_the_one_that_was_best(
    replicas: Replicas, name: str
) -> None:
    counts = await at_once(replicas, name, 30)
    assert max(counts.values()) <= 24


async def test_queue_depth_goes_around_the_engine_that_computes_long_prompts(replicas: Replicas) -> None:
    for name in ENGINES:
        await replicas.fault(name, slow=6)
    busy = [asyncio.create_task(ask(replicas, "round-robin", tokens(6000, f"long {n}"))) for n in range(2)]

    async def unstarted() -> list[str]:
        return [name for name, row in (await replicas.extproc.fleet()).items() if row["unstarted"]]

    try:
        await until(lambda: len_is(unstarted(), 2), 10.0, "two engines compute a long prompt")
        loaded = await unstarted()
        idle = asyncio.create_task(ask(replicas, "queue-depth"))
        await until(lambda: len_is(unstarted(), 3), 10.0, "the third has something to do as well")
        for name in ENGINES:
            await replicas.fault(name, slow=1)
        assert (await idle).endpoint not in loaded
    finally:
        for name in ENGINES:
            await replicas.fault(name, slow=1)
        await asyncio.gather(*busy)


async def len_is(listed: Awaitable[list[str]], length: int) -> bool:
    return len(await listed) == length


async def test_consistent_hash_keeps_a_session_and_spreads_sessions(replicas: Replicas) -> None:
    homes = set()
    for session in range(12):
        places = await in_turn(replicas, "consistent-hash", 3, x_session_id=f"session-{session}")
        assert len(set(places)) == 1
        homes.add(places[0])
    assert len(homes) >= 2


async def test_weights_of_a_route_split_versions(replicas: Replicas) -> None:
    counts = await at_once(replicas, "canary", 200)
    assert 4 <= counts["blue"] <= 40, "10 % of 200, drawn by chance"


async def test_weights_of_a_route_keep_a_session_on_its_version(replicas: Replicas) -> None:
    for session in range(10):
        places = await in_turn(replicas, "canary", 3, x_session_id=f"session-{session}")
        assert len({ENGINES[place]["version"] for place in places}) == 1


async def test_weighted_split_is_the_same_as_a_strategy(replicas: Replicas) -> None:
    counts = await at_once(replicas, "weighted-split", 80)
    assert 40 <= counts["blue"] <= 76, "three quarters of 80, drawn by chance"


@pytest.mark.parametrize("name", ["expected-latency", "weighted-score"])
async def test_strategies_that_see_the_cache_follow_the_prefix(replicas: Replicas, name: str) -> None:
    history = tokens(1500, f"history for {name}")
    first = await ask(replicas, name, history)
    for number in range(4):
        again = await ask(replicas, name, history + f" and {number}")
        assert again.endpoint == first.endpoint
        assert again.cached > 1000
