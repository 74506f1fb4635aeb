"""Limits end to end: what is let in, what clients are told, and what survives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import chat, running_lab
from tests.gateway.test_tenants import sha

KEY = {"authorization": "Bearer sk-a"}


def tenant(**limits: object) -> dict[str, object]:
    return {"tenants": {"a": {"keys": [sha("sk-a")], "limits": limits}}}


async def test_tokens_are_reserved_before_they_are_used(tmp_path: Path) -> None:
    """100 tokens a minute, five at once of 80 each: checking first and counting later would let all five in."""
    async with running_lab(tmp_path, ["e"], settings=tenant(tpm=100)) as lab:
        answers = await asyncio.gather(*(lab.post(chat("x" * 40, max_tokens=65), **KEY) for _ in range(5)))
        statuses = sorted(status for status, _, _ in answers)
        assert 1 <= statuses.count(200) <= 2
        assert set(statuses) == {200, 429}
        _, headers, body = next(answer for answer in answers if answer[0] == 429)
        assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
        assert "tokens per minute" in json.loads(body)["error"]["message"]
        assert int(headers["retry-after"]) >= 1
        assert headers["x-ratelimit-limit-tokens"] == "100"
        assert lab["e"].begun == statuses.count(200)


async def test_the_answer_says_what_is_left_and_usage_corrects_it(tmp_path: Path) -> None:
    async with running_lab(tmp_path, ["e"], settings=tenant(rpm=60, tpm=6000)) as lab:
        _, headers, _ = await lab.post(chat(max_tokens=3000), **KEY)
        assert headers["x-ratelimit-limit-requests"] == "60"
        assert headers["x-ratelimit-remaining-requests"] == "59"
        assert int(headers["x-ratelimit-remaining-tokens"]) < 3000
        assert headers["x-ratelimit-reset-requests"] in ("1s", "999ms", "998ms", "997ms", "1000ms")
        await lab.extproc.idle()
        # The engine says that it was 8 tokens.
        _, headers, _ = await lab.post(chat(max_tokens=10), **KEY)
        assert int(headers["x-ratelimit-remaining-tokens"]) > 5900


async def test_coming_back_when_told_succeeds_and_coming_early_costs_nothing(tmp_path: Path) -> None:
    async with running_lab(tmp_path, ["e"], settings=tenant(rpm=60, burst=1)) as lab:
        assert (await lab.post(**KEY))[0] == 200
        refused = [await lab.post(**KEY) for _ in range(5)]
        assert {status for status, _, _ in refused} == {429}
        await asyncio.sleep(int(refused[-1][1]["retry-after"]))
        assert (await lab.post(**KEY))[0] == 200


async def test_what_fails_before_its_first_byte_costs_nothing(tmp_path: Path) -> None:
    async with running_lab(tmp_path, ["e"], settings=tenant(rpm=1)) as lab:
        lab["e"].status = 500
        assert (await lab.post(**KEY))[0] == 500
        await lab.extproc.idle()
        lab["e"].status = 200
        assert (await lab.post(**KEY))[0] == 200
        assert (await lab.post(**KEY))[0] == 429


async def test_one_at_a_time_means_until_the_last_byte(tmp_path: Path) -> None:
    async with running_lab(tmp_path, ["e"], settings=tenant(concurrency=1)) as lab:
        engine = lab["e"]
        engine.chunks, engine.gate = 3, asyncio.Event()
        first = asyncio.create_task(lab.post(chat(stream=True), **KEY))
        await until(lambda: engine.active == 1, 5, "the first stream runs")
        second = asyncio.create_task(lab.post(chat(stream=True), **KEY))

        async def waits() -> bool:
            return (await lab.extproc.total("extproc_queue_requests")) == 1

        await until(waits, 5, "the second waits")
        assert engine.begun == 1
        engine.gate.set()
        assert (await first)[0] == 200
        assert (await second)[0] == 200
        assert engine.begun == 2


async def test_a_route_has_its_own_limit(tmp_path: Path) -> None:
    settings = {
        "routes": [
            {
                "name": "free",
                "match": {"header": {"X-Tier": "free"}},
                "pool": "pool",
                "rate_limit": {"rpm": 1},
            }
        ]
    }
    async with running_lab(tmp_path, ["e"], settings=settings) as lab:
        assert (await lab.post(x_tier="free"))[0] == 200
        assert (await lab.post(x_tier="free"))[0] == 429
        assert (await lab.post())[0] == 200


async def test_client_addresses_are_those_that_envoy_saw(tmp_path: Path) -> None:
    settings = {"rate_limits": {"client": {"rpm": 1}}}
    async with running_lab(tmp_path, ["e"], settings=settings) as lab:
        assert (await lab.post(x_forwarded_for="10.1.1.1"))[0] == 200
        # The same client, whatever it says of itself.
        assert (await lab.post(x_forwarded_for="10.2.2.2", x_envoy_external_address="10.3.3.3"))[0] == 429


async def test_the_budget_of_a_day_survives_a_restart(tmp_path: Path) -> None:
    async with running_lab(tmp_path, ["e"], settings=tenant(tokens_per_day=100)) as lab:
        assert (await lab.post(chat(max_tokens=90), **KEY))[0] == 200
        await lab.extproc.idle()
        # The engine says that it was 8 tokens each time.
        statuses = []
        while 429 not in statuses and len(statuses) < 20:
            status, headers, _ = await lab.post(chat(max_tokens=1), **KEY)
            statuses.append(status)
            await lab.extproc.idle()
        assert statuses == [200] * 12 + [429]
        assert int(headers["retry-after"]) > 0
        await lab.extproc.child.stop()
        await lab.gateway.restart_extproc()
        await lab.extproc.ready()
        await lab.gateway.decides()
        assert (await lab.post(chat(max_tokens=1), **KEY))[0] == 429


async def test_an_open_schedule_rules_over_the_usual_limits(tmp_path: Path) -> None:
    settings = tenant(rpm=1)
    settings["schedules"] = [{"name": "always", "tenants": {"a": {"rpm": 6000}}}]
    async with running_lab(tmp_path, ["e"], settings=settings) as lab:
        statuses = [(await lab.post(**KEY))[0] for _ in range(5)]
        assert statuses == [200] * 5
