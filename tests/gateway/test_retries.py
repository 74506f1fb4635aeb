"""Engines that are dead, busy or stuck, and the ways an endpoint is addressed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.echo_engine import EchoEngine
from tests.gateway.envoy_process import free_port, until
from tests.gateway.gateway_process import Lab, chat, cluster, gather_bounded, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEAD = f"127.0.0.1:{free_port()}"
ALSO_DEAD = f"127.0.0.1:{free_port()}"


def clusters(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
    a, b, c = (engines[name].address for name in "abc")
    return [
        # A cluster per replica.
        cluster("single-dead", DEAD, pool="singles", model="singles"),
        cluster("single-a", a, pool="singles", model="singles"),
        # A cluster with many endpoints.
        cluster("many", DEAD, a, b, ALSO_DEAD, pool="many", model="many"),
        # Mixtures of both.
        cluster("mixed-dead", DEAD, pool="mixed", model="mixed"),
        cluster("mixed-many", a, ALSO_DEAD, b, pool="mixed", model="mixed"),
        cluster("mixed-c", c, pool="mixed", model="mixed"),
        # Nobody is there.
        cluster("gone", DEAD, ALSO_DEAD, pool="gone", model="gone"),
        # A single one.
        cluster("alone", a, pool="alone", model="alone"),
        # Three that are well.
        cluster("trio", a, b, c, pool="trio", model="trio"),
    ]


def settings(failures: int) -> dict[str, Any]:
    pools = ("singles", "many", "mixed", "gone", "alone", "trio")
    return {
        "default_pool": "trio",
        "pools": {name: {"strategy": "round-robin", "fallbacks": 3} for name in pools},
        # Busy ones hardly rest: each is seen to be asked first.
        "health": {"failures": failures, "busy_backoff": 0.01, "max_busy_backoff": 0.01},
    }


@contextlib.asynccontextmanager
async def started(directory: Path, failures: int) -> AsyncIterator[Lab]:
    async with running_lab(directory, ("a", "b", "c"), clusters, settings(failures)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    # Nothing is ever excluded: the dead stay first choices, so that retries are seen.
    async with started(tmp_path_factory.mktemp("retries"), 1_000_000) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def lab(module_lab: Lab) -> Lab:
    await module_lab.settled()
    return module_lab


async def served_by(lab: Lab, model: str, count: int) -> Counter[str]:
    """Who answers ``count`` requests; all of them must be answered."""
    found: Counter[str] = Counter()
    for number in range(count):
        status, headers, reply = await lab.post(chat(f"{number}", model=model))
        assert status == 200, reply
        found[headers["x-engine"]] += 1
    return found


class TestADeadFirstChoice:
    async def test_of_a_cluster_per_replica(self, lab: Lab) -> None:
        assert await served_by(lab, "singles", 6) == {"a": 6}

    async def test_of_a_cluster_with_many_endpoints(self, lab: Lab) -> None:
        found = await served_by(lab, "many", 12)
        assert set(found) == {"a", "b"}

    async def test_of_a_mixture(self, lab: Lab) -> None:
        found = await served_by(lab, "mixed", 15)
        assert set(found) == {"a", "b", "c"}

    async def test_is_tried_once(self, lab: Lab) -> None:
        before = await failed_attempts(lab)
        await served_by(lab, "singles", 10)
        await lab.extproc.idle()
        after = await failed_attempts(lab)
        assert sum((after - before).values()) == 5

    async def test_of_a_hundred_at_once_costs_no_client_an_error(self, lab: Lab) -> None:
        async def one(number: int) -> int:
            return (await lab.post(chat(f"{number}", model="singles")))[0]

        assert Counter(await gather_bounded(100, 100, one)) == {200: 100}

    async def test_with_nobody_else_is_a_503_in_shape(self, lab: Lab) -> None:
        status, headers, reply = await lab.post(chat(model="gone"))
        assert (status, headers["content-type"]) == (503, "application/json")
        assert b'"gateway_error"' in reply


async def failed_attempts(lab: Lab) -> Counter[str]:
    samples = await lab.extproc.metrics()
    return Counter(
        {name: int(v) for name, v in samples.items() if name.startswith("extproc_attempts_failed_total")}
    )


@pytest.mark.parametrize("model", ["singles", "many", "mixed", "trio"])
async def test_leases_stand_with_the_endpoint_that_serves(lab: Lab, model: str) -> None:
    gate = asyncio.Event()
    for engine in lab.engines.values():
        engine.gate = gate
    running = [asyncio.create_task(lab.post(chat(f"{n}", model=model))) for n in range(12)]

    async def agree() -> bool:
        """What extproc believes is what the engines have."""
        fleet = await lab.extproc.get("/fleet")
        believed: Counter[str] = Counter()
        for row in fleet["endpoints"]:
            if row["pool"] == model and row["leases"]:
                believed[row["endpoint"].split("/")[1]] += row["leases"]
        true = Counter({engine.address: engine.active for engine in lab.engines.values() if engine.active})
        return believed == true and true.total() == 12

    await until(agree, 10, "extproc counts requests where they are")
    gate.set()
    assert [status for status, _, _ in await asyncio.gather(*running)] == [200] * 12
    await lab.extproc.idle()


async def test_every_attempt_takes_the_next_choice_of_the_decision(lab: Lab) -> None:
    """Round-robin over dead, a, b, dead: the engine that answers is the first living one after the first choice."""
    for number in range(8):
        _, headers, _ = await lab.post(chat(f"{number}", model="many"))
        decision = (await lab.extproc.get("/decisions?count=1"))["decisions"][0]
        order = [decision["chosen"], *decision["fallbacks"]]
        alive = {engine.address: name for name, engine in lab.engines.items()}
        expected = next(alive[key.split("/")[1]] for key in order if key.split("/")[1] in alive)
        assert headers["x-engine"] == expected


class TestBusyEngines:
    async def test_a_503_is_answered_by_another(self, lab: Lab) -> None:
        lab["a"].status = 503
        assert set(await served_by(lab, "trio", 9)) == {"b", "c"}

    async def test_bursts_of_503_of_the_only_one_are_passed_and_it_is_still_asked(self, lab: Lab) -> None:
        lab["a"].reply_headers = {"retry-after": "7"}
        for _ in range(20):
            lab["a"].statuses = [503] * 2
            status, headers, _ = await lab.post(chat(model="alone"))
            assert (status, headers["retry-after"]) == (503, "7")
            assert (await lab.post(chat(model="alone")))[0] in (200, 503)
            lab["a"].statuses = []
            assert (await lab.post(chat(model="alone")))[0] == 200

    async def test_a_503_of_the_only_one_is_not_sent_again(self, lab: Lab) -> None:
        lab["a"].status = 503
        assert (await lab.post(chat(model="alone")))[0] == 503
        assert lab["a"].begun == 1

    async def test_429_and_500_go_to_the_client(self, lab: Lab) -> None:
        for status in (429, 500, 400):
            lab["a"].status = status
            assert (await lab.post(chat(model="alone")))[0] == status
        assert lab["a"].begun == 3


async def test_one_stuck_engine_does_not_hold_up_the_others(lab: Lab) -> None:
    gate = asyncio.Event()
    lab["a"].gate = gate
    running = [asyncio.create_task(lab.post(chat(f"{n}", model="trio"))) for n in range(60)]
    # A third waits in the stuck one; nothing waits because of them.
    await until(lambda: sum(task.done() for task in running) == 40, 10, "two thirds are served")
    assert lab["a"].active == 20
    gate.set()
    answers = await asyncio.gather(*running)
    assert Counter(headers["x-engine"] for _, headers, _ in answers) == {"a": 20, "b": 20, "c": 20}


async def test_a_request_served_by_its_second_choice_is_a_success(lab: Lab) -> None:
    await lab.extproc.idle()
    await served_by(lab, "singles", 2)
    await lab.extproc.idle()
    outcomes = [item["outcome"] for item in (await lab.extproc.get("/decisions?count=2"))["decisions"]]
    assert sorted((item["outcome"], item["attempts"]) for item in outcomes) == [
        ("success", 1),
        ("success", 2),
    ]
    assert {item["endpoint"].split("/")[0] for item in outcomes} == {"single-a"}


async def test_400_requests_of_one_prompt_are_spread_over_8_equal_replicas(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    names = [f"e{n}" for n in range(8)]

    def one_cluster(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
        return [cluster("all", *(engine.address for engine in engines.values()))]

    async with running_lab(tmp_path_factory.mktemp("eight"), names, one_cluster) as eight:
        gate = asyncio.Event()
        for engine in eight.engines.values():
            engine.gate = gate
        body = chat("the same long prompt " * 100)
        running = [asyncio.create_task(eight.post(body)) for _ in range(400)]
        await until(
            lambda: sum(engine.active for engine in eight.engines.values()) == 400, 20, "400 requests run"
        )
        held = [engine.active for engine in eight.engines.values()]
        gate.set()
        assert {status for status, _, _ in await asyncio.gather(*running)} == {200}
        print(f"\n400 concurrent requests of one prompt on 8 replicas: {sorted(held)}")
        assert max(held) <= 1.25 * 400 / 8
