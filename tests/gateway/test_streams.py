"""Token streams: nothing of them passes through extproc, and what became of them is known all the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Lab, chat, gather_bounded, renew_every, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = {"pools": {"pool": {"strategy": "least-requests"}}, "health": {"failures": 10_000}}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    directory = tmp_path_factory.mktemp("streams")
    async with running_lab(directory, ("a", "b"), settings=SETTINGS, change=renew_every(0.5)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def lab(module_lab: Lab) -> Lab:
    await module_lab.settled()
    return module_lab


def events(body: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def everywhere(lab: Lab, **changes: Any) -> None:
    for engine in lab.engines.values():
        for name, value in changes.items():
            setattr(engine, name, value)


def difference(before: dict[str, float], after: dict[str, float], beginning: str) -> dict[str, float]:
    """Series of one metric that grew, and by how much."""
    return {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if name.startswith(beginning) and value != before.get(name, 0.0)
    }


async def test_a_long_stream_costs_as_many_messages_as_a_short_one(lab: Lab) -> None:
    spent = {}
    for chunks in (10, 1000):
        everywhere(lab, chunks=chunks)
        before = await lab.extproc.metrics()
        for _ in range(5):
            status, _, body = await lab.post(chat(stream=True))
            assert (status, len(events(body))) == (200, chunks + 1)
        await lab.extproc.idle()
        after = await lab.extproc.metrics()
        spent[chunks] = {
            name: after[name] - before[name] for name in ("extproc_messages_total", "extproc_streams_total")
        }
    print(f"\nfor 5 streams of 10 and of 1,000 chunks: {spent}")
    assert spent[10] == spent[1000] == {"extproc_messages_total": 10, "extproc_streams_total": 5}


async def test_the_first_event_arrives_before_the_engine_makes_the_second(lab: Lab) -> None:
    gate = asyncio.Event()
    everywhere(lab, chunks=3, gate=gate)
    async with lab.session.post(lab.url + "/v1/chat/completions", data=chat(stream=True)) as reply:
        first = await reply.content.readuntil(b"\n\n")
        assert b"t0 " in first
        gate.set()
        assert len(events(first + await reply.content.read())) == 4


async def test_clients_get_exactly_the_engines_events_and_tokens_are_counted_all_the_same(lab: Lab) -> None:
    everywhere(lab, chunks=20)
    before = await lab.extproc.metrics()
    _, _, body = await lab.post(chat(stream=True))
    assert [len(event["choices"]) for event in events(body)] == [1] * 20 + [0]
    (received,) = [*lab["a"].posts, *lab["b"].posts]
    assert b"stream_options" not in received.body
    await lab.extproc.idle()
    counted = difference(before, await lab.extproc.metrics(), "extproc_tokens_total")
    assert sorted(counted.values()) == [7.0, 20.0]


async def test_time_to_first_token_is_known(lab: Lab) -> None:
    everywhere(lab, chunks=5)
    before = await lab.extproc.metrics()
    await lab.post(chat(stream=True))
    await lab.extproc.idle()
    grown = difference(before, await lab.extproc.metrics(), "extproc_ttft_seconds_count")
    assert list(grown.values()) == [1.0]


class TestCutShort:
    async def test_the_client_sees_an_error_and_no_engine_a_second_attempt(self, lab: Lab) -> None:
        everywhere(lab, chunks=10, cut_after=3)
        before = await lab.extproc.metrics()
        with pytest.raises(aiohttp.ClientPayloadError):
            await lab.post(chat(stream=True))
        assert lab["a"].begun + lab["b"].begun == 1
        await lab.extproc.idle()
        grown = difference(before, await lab.extproc.metrics(), "extproc_requests_total")
        (name,) = grown
        assert 'code="200"' in name
        assert 'reason="ok"' not in name

    async def test_the_engine_is_blamed(self, lab: Lab) -> None:
        everywhere(lab, chunks=10, cut_after=3)
        with pytest.raises(aiohttp.ClientPayloadError):
            await lab.post(chat(stream=True))
        (name,) = [engine.name for engine in lab.engines.values() if engine.begun]
        await lab.extproc.idle()
        assert (await lab.extproc.fleet())[name]["failures"] > 0

    async def test_a_reply_that_never_began_is_not_sent_twice_either(self, lab: Lab) -> None:
        """The engine had the whole request: it may have worked on it."""
        everywhere(lab, cut_after=0)
        status, headers, reply = await lab.post()
        assert (status, headers["content-type"]) == (503, "application/json")
        assert json.loads(reply)["error"]["type"] == "gateway_error"
        assert lab["a"].begun + lab["b"].begun == 1


async def test_running_streams_show_in_the_fleet_and_are_spread(lab: Lab) -> None:
    gate = asyncio.Event()
    everywhere(lab, chunks=2, gate=gate)
    running = [asyncio.create_task(lab.post(chat(f"{n}", stream=True))) for n in range(40)]
    await until(lambda: lab["a"].active + lab["b"].active == 40, 10, "40 streams run")
    fleet = await lab.extproc.fleet()
    assert {name: row["leases"] for name, row in fleet.items()} == {"a": 20, "b": 20}
    gate.set()
    assert [status for status, _, _ in await asyncio.gather(*running)] == [200] * 40
    await lab.extproc.idle()


async def test_leases_of_long_streams_are_renewed_and_outlive_their_first_minute(lab: Lab) -> None:
    gate = asyncio.Event()
    everywhere(lab, chunks=2, gate=gate)
    running = asyncio.create_task(lab.post(chat(stream=True)))
    before = (await lab.extproc.metrics())["extproc_records_total"]

    async def renewed() -> bool:
        return (await lab.extproc.metrics())["extproc_records_total"] >= before + 2

    await until(renewed, 10, "two renewals")
    samples = await lab.extproc.metrics()
    assert samples["extproc_leases"] == 1
    # The first token is known from the renewal: nothing waits to be prefilled any more.
    assert sum(row["unstarted"] for row in (await lab.extproc.fleet()).values()) == 0
    gate.set()
    assert (await running)[0] == 200
    await lab.extproc.idle()


async def test_300_streams_at_once(lab: Lab) -> None:
    everywhere(lab, chunks=50, chunk_delay_s=0.02)
    before = await lab.extproc.metrics()

    async def one(number: int) -> int:
        status, _, body = await lab.post(chat(f"prompt {number}", stream=True))
        return status if len(events(body)) == 51 else 0

    assert await gather_bounded(300, 300, one) == [200] * 300
    await lab.extproc.idle()
    after = await lab.extproc.metrics()
    cpu = after["extproc_process_cpu_seconds_total"] - before["extproc_process_cpu_seconds_total"]
    print(f"\nextproc CPU for 300 streams of 50 events: {cpu:.2f} s ({cpu / 300 * 1000:.1f} ms each)")
    assert after["extproc_messages_total"] - before["extproc_messages_total"] == 600
