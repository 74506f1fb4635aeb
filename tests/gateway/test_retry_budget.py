"""The retry budget and the idempotency key through a real Envoy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.envoy_process import free_port
from tests.gateway.gateway_process import Lab, chat, cluster, gather_bounded, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

BURST = 10
AT_ONCE = 4
DEAD = f"127.0.0.1:{free_port()}"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    settings: dict[str, Any] = {
        "default_pool": "pool",
        "retries": {"budget": 0.2, "burst": BURST},
        "health": {"busy_backoff": 0.01, "max_busy_backoff": 0.01},
        "pools": {"pool": {"strategy": "round-robin"}},
    }

    def clusters(engines: Any) -> list[dict[str, Any]]:
        return [cluster(name, engine.address) for name, engine in engines.items()]

    async with running_lab(tmp_path_factory.mktemp("budget"), ("a", "b", "c"), clusters, settings) as running:
        yield running


async def test_retries_of_busy_answers_stay_within_a_fifth_of_the_requests(lab: Lab) -> None:
    """Two of three are always busy."""
    count = 1000
    lab["a"].status = lab["b"].status = 503
    found = await gather_bounded(count, AT_ONCE, lambda number: lab.post(chat(f"{number}")))
    attempts = sum(engine.begun for engine in lab.engines.values())
    statuses = Counter(status for status, _, _ in found)
    await lab.settled()
    print(
        f"\n{count} requests, two of three busy: {attempts} attempts, {attempts / count:.3f} a request, {statuses}"
    )
    assert attempts <= 1.2 * count + BURST + AT_ONCE
    assert await lab.extproc.total("extproc_retries_withheld_total") > 0


async def test_the_budget_comes_back(lab: Lab) -> None:
    await lab.settled()
    for number in range(2 * 5 * BURST):
        assert (await lab.post(chat(f"{number}")))[0] == 200
    lab["a"].status = 503
    assert [(await lab.post(chat(f"{number}")))[0] for number in range(9)] == [200] * 9
    await lab.settled()


async def test_dead_engines_are_retried_without_any_budget(tmp_path: Path) -> None:
    def clusters(engines: Any) -> list[dict[str, Any]]:
        return [cluster("dead", DEAD), cluster("b", engines["b"].address)]

    settings: dict[str, Any] = {
        "retries": {"budget": 0, "burst": 0},
        "health": {"failures": 1_000_000},
        "pools": {"pool": {"strategy": "round-robin"}},
    }
    async with running_lab(tmp_path, ("b",), clusters, settings) as bare:
        answers = await asyncio.gather(*(bare.post(chat(f"{n}")) for n in range(60)))
        assert Counter(status for status, _, _ in answers) == {200: 60}
        bare["b"].status = 503
        assert (await bare.post())[0] == 503


async def test_every_request_has_an_idempotency_key_the_same_on_each_attempt(lab: Lab) -> None:
    lab["a"].statuses = lab["b"].statuses = lab["c"].statuses = [503]
    await lab.post(chat("once"))
    sent = [one.headers for engine in lab.engines.values() for one in engine.posts]
    assert len(sent) == 2
    assert {headers["idempotency-key"] for headers in sent} == {sent[0]["x-gateway-request-id"]}
    assert [name for headers in sent for name in headers if name.startswith("x-envoy-re")] == []
    await lab.settled()


async def test_a_clients_idempotency_key_is_passed_on(lab: Lab) -> None:
    await lab.post(chat("once"), idempotency_key="the-client's own")
    (sent,) = [one.headers for engine in lab.engines.values() for one in engine.posts]
    assert sent["idempotency-key"] == "the-client's own"
    await lab.settled()


async def test_when_every_engine_is_busy_attempts_stay_within_a_fifth(lab: Lab) -> None:
    """100 % of upstream answers are 503. Last: it opens the pool's circuit."""
    for engine in lab.engines.values():
        engine.status = 503
    answers = Counter(await gather_bounded(500, AT_ONCE, lambda number: status_of(lab, number)))
    attempts = sum(engine.begun for engine in lab.engines.values())
    await lab.settled()
    print(f"\n500 requests, all engines busy: {attempts} attempts, {attempts / 500:.3f} a request")
    assert set(answers) <= {429, 503}
    assert attempts <= 1.2 * 500 + BURST + AT_ONCE


async def status_of(lab: Lab, number: int) -> int:
    return (await lab.post(chat(f"{number}")))[0]
