"""The stream guard in front of engines that stream, stall and talk too long, through a real Envoy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Lab, chat, gather_bounded, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIRST, WHOLE, CUT = "first-token", "whole-stream", "cut"
PATIENT = {"first_token": "patient-first-token", "whole_stream": "patient-whole-stream"}
"""Bounds that a busy machine does not reach."""
SETTINGS = {
    "pools": {"pool": {"strategy": "round-robin"}},
    "routes": [
        {
            "name": FIRST,
            "match": {"header": {"X-Guard": FIRST}},
            "pool": "pool",
            "guard": {"level": "first_token", "first_token": 0.6},
        },
        {
            "name": WHOLE,
            "match": {"header": {"X-Guard": WHOLE}},
            "pool": "pool",
            "guard": {"level": "whole_stream", "first_token": 0.6, "heartbeat": 0.2, "idle": 1.0},
        },
        {
            "name": CUT,
            "match": {"header": {"X-Guard": CUT}},
            "pool": "pool",
            "guard": {
                "level": "whole_stream",
                "first_token": 5.0,
                "heartbeat": None,
                "total": 0.3,
                "per_token": 0.01,
            },
        },
        *(
            {
                "name": name,
                "match": {"header": {"X-Guard": name}},
                "pool": "pool",
                "guard": {"level": level, "first_token": 60},
            }
            for level, name in PATIENT.items()
        ),
    ],
    "health": {"failures": 10_000, "error_rate": 1.0},
}
STREAM = chat(stream=True)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    directory: Path = tmp_path_factory.mktemp("guard")
    async with running_lab(directory, ("a",), settings=SETTINGS) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def lab(module_lab: Lab) -> Lab:
    await module_lab.settled()
    return module_lab


async def said(lab: Lab, what: str) -> float:
    return (await lab.extproc.metrics()).get(f'extproc_guard_events_total{{event="{what}"}}', 0.0)


async def unguarded(lab: Lab) -> bytes:
    """The engine's stream as it is."""
    return (await lab.post(STREAM))[2]


@pytest.mark.parametrize("level", PATIENT.values())
@pytest.mark.parametrize("delay_s", [0.0, 0.002])
async def test_sixty_fast_streams_are_intact_byte_for_byte(lab: Lab, level: str, delay_s: float) -> None:
    lab["a"].chunks, lab["a"].padding, lab["a"].chunk_delay_s = 40, 200, delay_s
    wanted = await unguarded(lab)
    before = await lab.extproc.total("extproc_guard_streams_total")

    async def one(_number: int) -> tuple[int, bytes]:
        status, _, reply = await lab.post(STREAM, x_guard=level)
        return status, reply

    replies = await gather_bounded(60, 20, one)
    assert replies == [(200, wanted)] * 60
    assert await lab.extproc.total("extproc_guard_streams_total") - before == 60
    await lab.extproc.idle()


@pytest.mark.parametrize("level", [FIRST, WHOLE])
async def test_an_engine_without_a_first_token_is_a_504_and_is_told_to_stop(lab: Lab, level: str) -> None:
    """Whether it is silent before its response header (a JSON reply that waits) or after it."""
    lab["a"].gate = asyncio.Event()
    status, _, reply = await lab.post(STREAM, x_guard=level)
    assert (status, json.loads(reply)["error"]["code"]) == (504, "first_token_timeout")
    lab["a"].silent_start = True
    lab["a"].chunks = 3
    status, _, reply = await lab.post(STREAM, x_guard=level)
    assert (status, json.loads(reply)["error"]["code"]) == (504, "first_token_timeout")
    await until(lambda: lab["a"].aborted == 2, 5.0, "engine told to stop")
    await lab.extproc.idle()


async def test_a_client_of_anthropic_gets_its_own_dialect(lab: Lab) -> None:
    lab["a"].gate = asyncio.Event()
    status, _, reply = await lab.post(STREAM, "/v1/messages", x_guard=FIRST)
    assert (status, json.loads(reply)["type"]) == (504, "error")


async def test_first_token_leaves_after_it(lab: Lab) -> None:
    lab["a"].chunks, lab["a"].gate = 3, asyncio.Event()
    before = await lab.extproc.total("extproc_guard_streams_total")
    running = asyncio.create_task(lab.post(STREAM, x_guard=FIRST))

    async def left() -> bool:
        samples = await lab.extproc.metrics()
        return (
            samples["extproc_guard_streams_total"] > before
            and samples["extproc_guard_streams_open"] == 0
            and samples["extproc_leases"] == 1
        )

    await until(left, 5.0, "the guard left while the stream runs")
    lab["a"].gate.set()
    assert (await running)[0] == 200


async def test_heartbeats_fill_silence_and_a_stalled_stream_ends_cleanly(lab: Lab) -> None:
    lab["a"].chunks, lab["a"].gate = 3, asyncio.Event()
    beats, idles = await said(lab, "heartbeat"), await said(lab, "idle")
    status, _, reply = await lab.post(STREAM, x_guard=WHOLE)
    assert status == 200
    assert reply.count(b": ping\n\n") == await said(lab, "heartbeat") - beats >= 2
    assert reply.endswith(b"data: [DONE]\n\n")
    last = json.loads(reply.split(b"data: ")[-2])
    assert last["choices"][0]["finish_reason"] == "length"
    assert await said(lab, "idle") - idles == 1
    await until(lambda: lab["a"].aborted == 1, 5.0, "engine told to stop")
    await lab.extproc.idle()


async def test_a_heartbeat_leaves_the_engines_bytes_alone(lab: Lab) -> None:
    lab["a"].chunks, lab["a"].chunk_delay_s = 3, 0.35
    status, _, reply = await lab.post(STREAM, x_guard=WHOLE)
    lab["a"].chunk_delay_s = 0.0
    assert status == 200
    assert b": ping\n\n" in reply
    assert reply.replace(b": ping\n\n", b"") == await unguarded(lab)


async def test_a_stream_that_goes_on_too_long_is_cut_at_an_event(lab: Lab) -> None:
    """The bound is 0.3 s and 10 ms for each of 20 tokens."""
    lab["a"].chunks, lab["a"].chunk_delay_s = 1000, 0.02
    status, _, reply = await lab.post(chat(stream=True, max_tokens=20), x_guard=CUT)
    assert status == 200
    *events, done, empty = reply.split(b"\n\n")
    assert (done, empty) == (b"data: [DONE]", b"")
    shown = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    assert shown[-1]["finish_reason"] == "length"
    texts = [choice["delta"]["content"].split()[0] for choice in shown[:-1]]
    assert texts == [f"t{number}" for number in range(len(texts))]
    await until(lambda: lab["a"].aborted == 1, 5.0, "engine told to stop")
    await lab.extproc.idle()


@pytest.mark.parametrize("level", PATIENT.values())
async def test_an_engine_that_breaks_off_is_an_error_of_its_own(lab: Lab, level: str) -> None:
    lab["a"].cut_after = 0
    status, _, reply = await lab.post(STREAM, x_guard=level)
    assert (status, json.loads(reply)["error"]["code"]) == (503, "gateway_error")
    await lab.extproc.idle()


@pytest.mark.parametrize("level", PATIENT.values())
async def test_what_is_no_stream_of_tokens_is_left_alone(lab: Lab, level: str) -> None:
    status, _, plain = await lab.post(chat(), x_guard=level)
    assert (status, json.loads(plain)["object"]) == (200, "chat.completion")
    lab["a"].status = 400
    status, _, reply = await lab.post(STREAM, x_guard=level)
    assert (status, json.loads(reply)["error"]["message"]) == (400, "told so")


async def test_the_engine_does_not_see_the_guards_header_and_clients_cannot_send_it(lab: Lab) -> None:
    lab["a"].chunks = 2
    before = await lab.extproc.total("extproc_guard_streams_total")
    assert (await lab.post(STREAM, x_gateway_guard="first_token;first=0.001"))[0] == 200
    assert await lab.extproc.total("extproc_guard_streams_total") == before
    await lab.post(STREAM, x_guard=PATIENT["first_token"])
    assert not any("x-gateway-guard" in item.headers for item in lab["a"].posts)


async def test_a_client_that_leaves_ends_the_guards_watch(lab: Lab) -> None:
    lab["a"].chunks, lab["a"].gate = 3, asyncio.Event()
    running = asyncio.create_task(lab.post(STREAM, x_guard=WHOLE))
    await until(lambda: lab["a"].active == 1, 5.0, "request at the engine")
    running.cancel()

    async def gone() -> bool:
        return (await lab.extproc.metrics())["extproc_guard_streams_open"] == 0

    await until(gone, 5.0, "the guard's stream closed")
    await until(lambda: lab["a"].active == 0, 5.0, "engine told to stop")


async def test_refused_requests_are_no_guards_business(lab: Lab) -> None:
    before = await lab.extproc.total("extproc_guard_streams_total")
    assert (await lab.post(chat(model="nobody-serves-this")))[0] == 404
    assert await lab.extproc.total("extproc_guard_streams_total") == before
