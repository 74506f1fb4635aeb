"""Where requests go: real Envoy, real extproc, simulated engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.replicas import MODEL, Answer, Replicas, running_replicas, spread, tokens

PREFILL = 8000
"""Tokens per second of the engines and, from the start, in the gateway's belief."""
ENGINE = ("--set", f"prefill_tokens_per_s={PREFILL}", "--set", "max_num_seqs=256")
POOL = {"pools": {"pool": {"prefill_tokens_per_second": PREFILL}}}


@pytest.fixture
async def four(tmp_path: Path) -> AsyncIterator[Replicas]:
    async with running_replicas(tmp_path, 4, *ENGINE, settings=POOL) as replicas:
        yield replicas


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Replicas]:
    async with running_replicas(tmp_path, 2, *ENGINE, settings=POOL) as replicas:
        yield replicas


async def converse(replicas: Replicas, name: str, turns: int) -> list[Answer]:
    """A chat in which each turn repeats all that was said."""
    said = [{"role": "system", "content": f"{name}: be brief."}]
    answers = []
    for turn in range(turns):
        said.append({"role": "user", "content": tokens(600, f"{name} turn {turn}")})
        answer = await replicas.ask(said)
        said.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers


def costs(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Candidates of a record by cluster, cost terms by name."""
    return {
        row["endpoint"].partition("/")[0]: {
            **row,
            **dict(zip(record["terms"], row["terms"], strict=True)),
        }
        for row in record["candidates"]
    }


async def test_chats_follow_their_prefix(four: Replicas) -> None:
    chats = []
    for group in ("morning", "evening"):
        chats += await asyncio.gather(*(converse(four, f"{group} chat {number}", 4) for number in range(4)))
    stayed = 0
    for chat in chats:
        for turn, (before, now) in enumerate(pairwise(chat), 1):
            if now.endpoint == before.endpoint:
                stayed += 1
                assert now.cached >= 0.9 * 600, "the engine finds what was said in its cache"
                if len({answer.endpoint for answer in chat[: turn + 1]}) == 1:
                    assert now.cached >= 0.9 * 600 * turn, "all of it where the chat never moved"
    assert stayed >= 0.85 * 24, "a queue may be worth leaving now and then, on a busy machine"
    assert len(spread(chat[0] for chat in chats)) >= 3, "while different chats use all replicas"


async def test_a_shared_short_system_prompt_spreads(four: Replicas) -> None:
    system = {"role": "system", "content": tokens(100, "assistant")}
    await four.ask([system, {"role": "user", "content": "hello"}])
    chats = [[system, {"role": "user", "content": tokens(200, f"user {number}")}] for number in range(40)]
    counts = spread(await four.together(chats, max_tokens=32))
    assert len(counts) == 4
    assert max(counts.values()) <= 1.25 * 10


async def test_two_chats_with_one_system_prompt_keep_to_their_own_replicas(two: Replicas) -> None:
    system = {"role": "system", "content": tokens(500, "system")}
    chats = [[system, {"role": "user", "content": tokens(2500, f"history {name}")}] for name in "ab"]
    first = await two.together(chats)
    assert len(spread(first)) == 2, "one each, as both begin at once"
    for turn in range(4):
        for chat, before in zip(chats, first, strict=True):
            answer = await two.ask([*chat, {"role": "user", "content": f"and {turn}?"}])
            assert answer.endpoint == before.endpoint
            assert answer.cached > 2500


async def test_a_hot_prefix_spills_when_waiting_costs_more_than_computing_and_not_before(
    two: Replicas,
) -> None:
    prefix = {"role": "system", "content": tokens(6000, "handbook")}
    warm = await two.ask([prefix, {"role": "user", "content": "ready?"}])
    home = warm.endpoint
    other = next(name for name in two.addresses if name != home)
    for number in range(3):
        calm = await two.ask([prefix, {"role": "user", "content": f"question {number}"}])
        assert calm.endpoint == home, "without a queue there is no reason to leave"
    questions = [
        [prefix, {"role": "user", "content": tokens(1200, f"asker {number}")}] for number in range(16)
    ]
    burst = await two.together(questions)
    assert all(answer.status == 200 for answer in burst)
    records = sorted([await two.decision(answer) for answer in burst], key=lambda record: record["at"])
    left = [record for record in records if record["chosen"].startswith(other)]
    assert left, "the queue at home grew beyond the price of computing the prefix again"
    for record in records:
        rows = costs(record)
        assert record["chosen"].startswith(min(rows, key=lambda name: rows[name]["cost"]))
    spill = costs(left[0])
    assert spill[home]["matched_tokens"] > 5000 > spill[other]["matched_tokens"]
    assert spill[home]["cost"] > spill[other]["cost"] >= spill[other]["prefill s"]
    assert spill[home]["queue s"] > 0.5, "it is the wait that costs"
    before = [record for record in records if record["at"] < left[0]["at"]]
    assert len(before) >= 3, "and until then every request stayed"
    assert all(record["chosen"].startswith(home) for record in before)
    after = costs(records[-1])
    assert after[other]["matched_tokens"] > 5000, "from then on the other replica holds it too"


async def test_800_equal_prompts_at_once_spread_over_8_equal_replicas(tmp_path: Path) -> None:
    async with running_replicas(tmp_path, 8, *ENGINE, settings=POOL) as eight:
        prompts = ["The same question."] * 800
        asked = asyncio.create_task(eight.together(prompts, max_tokens=300, chunk_tokens=100))
        most = 0
        while not asked.done():
            most = max(most, sum(row["leases"] for row in (await eight.extproc.fleet()).values()))
            await asyncio.sleep(0.1)
        answers = await asked
        assert not [answer.text for answer in answers if answer.status != 200]
        counts = spread(answers)
        print("800 equal prompts:", dict(counts), "most at once:", most)
        assert len(counts) == 8
        assert max(counts.values()) <= 1.25 * 100


@pytest.mark.parametrize("fault", ["freeze_metrics", "no_metrics", "garbage_metrics"])
async def test_metrics_that_tell_nothing_change_nothing_fatal(four: Replicas, fault: str) -> None:
    for name in four.addresses:
        await four.fault(name, **{fault: True})
    await four.ask("a page of the broken kind is read before the load comes")
    prompts = [tokens(300, f"request {number}") for number in range(64)]
    answers = await four.together(prompts, max_tokens=32)
    assert {answer.status for answer in answers} == {200}
    assert max(spread(answers).values()) <= 1.2 * 16
    again = await four.ask(prompts[0])
    assert again.cached > 250, "the prefix is found without metrics"


async def test_a_slow_replica_gets_less_and_its_share_back_when_it_recovers(four: Replicas) -> None:
    slow = "replica-2"
    numbers = iter(range(1_000_000))

    async def share(requests: int) -> float:
        """Part of the next requests that the replica gets; 80 at a time, or nobody would have to wait for the fast ones."""
        start = len(four.answers)

        async def client() -> None:
            while len(four.answers) - start < requests:
                await four.ask(tokens(400, f"work {next(numbers)}"))

        await asyncio.gather(*(client() for _ in range(80)))
        return spread(four.answers[start:])[slow] / (len(four.answers) - start)

    async def share_until(enough: Any, rounds: int) -> list[float]:
        seen = []
        for _ in range(rounds):
            seen.append(await share(100))
            if enough(seen[-1]):
                break
        return seen

    await four.fault(slow, slow=5)
    falling = await share_until(lambda value: value <= 0.12, 8)
    assert falling[-1] <= 0.12, f"a quarter would be its share if it were as fast as the others: {falling}"
    settled = await share(360)
    assert 0.01 <= settled <= 0.15, "by its speed a sixteenth is due"
    await four.fault(slow, slow=1)
    rising = await share_until(lambda value: value >= 0.2, 20)
    print("share when slow:", falling, settled, "after it recovered:", rising)
    assert rising[-1] >= 0.2, f"it never got its share back: {rising}"


async def test_requests_go_where_their_adapter_is_loaded(tmp_path: Path) -> None:
    flags = (
        *ENGINE,
        "--adapter",
        "sql",
        "--adapter",
        "legal",
        "--set",
        "max_loras=1",
        "--set",
        "adapter_load_s=0.3",
    )
    settings = {"pools": {"pool": {"models": [MODEL], "adapters": ["sql", "legal"]}}}
    async with running_replicas(tmp_path, 2, *flags, settings=settings) as two:
        sql = await two.ask("select", model="sql")
        legal = await two.ask("whereas", model="legal")
        assert (sql.status, legal.status) == (200, 200)
        assert sql.endpoint != legal.endpoint, "a free place costs less than a busy one"
        for number in range(4):
            assert (await two.ask(f"select {number}", model="sql")).endpoint == sql.endpoint
            assert (await two.ask(f"whereas {number}", model="legal")).endpoint == legal.endpoint
        rows = costs(await two.decision(two.answers[-1]))
        assert rows[sql.endpoint]["adapter s"] > 0 == rows[legal.endpoint]["adapter s"]
