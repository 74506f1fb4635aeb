"""The load generator against its own engine, and the benchmark's gateways against a real Envoy."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.client import Client, Sample, Shot, Target, closed_loop, open_loop
from loadtest.log_cost import record_cost_s
from loadtest.processes import Processes, StartError, free_port, listening, processes, python
from loadtest.responder import Reply
from loadtest.stage import build

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path) as found:
        yield found


@pytest.fixture
def engine(children: Processes) -> Target:
    port = free_port()
    children.start("engine", python("loadtest.responder", "--port", str(port)))
    children.wait_for("engine", lambda: listening(port))
    return Target("127.0.0.1", port)


async def test_streams_are_read_to_their_end(engine: Target) -> None:
    client = Client(engine)
    request = engine.request(BODY, Reply(5, 0.001).header())
    samples = await open_loop(client, (Shot(0.001 * place, request, True) for place in range(50)))
    await client.close()
    assert len(samples) == 50
    assert {sample.error for sample in samples} == {""}
    assert {sample.events for sample in samples} == {7}  # five tokens, usage, [DONE]
    assert all(sample.intended_s <= sample.sent_s <= sample.first_s <= sample.end_s for sample in samples)
    assert client.in_flight == client.streaming == 0


async def test_waiting_for_a_connection_counts_as_latency(engine: Target) -> None:
    client = Client(engine, max_open=1)
    request = engine.request(BODY, Reply(4, 0.02).header())
    samples = await open_loop(client, (Shot(0.0, request, True) for _ in range(5)))
    await client.close()
    waits = sorted(sample.late_s for sample in samples)
    assert waits[-1] > 0.2  # behind four replies of at least 60 ms each, though nothing was refused


async def test_a_reply_that_takes_too_long_is_a_timeout(engine: Target) -> None:
    client = Client(engine, timeout_s=0.1)
    request = engine.request(BODY, Reply(1000, 0.05).header())
    (sample,) = await open_loop(client, iter([Shot(0.0, request, True)]))
    await client.close()
    assert sample.error == "timeout"


async def test_nobody_there_is_an_error_of_each_request() -> None:
    target = Target("127.0.0.1", free_port())
    client = Client(target)
    samples = await open_loop(client, (Shot(0.0, target.request(BODY)) for _ in range(3)))
    await client.close()
    assert [sample.error for sample in samples] == ["connect"] * 3


async def test_a_reply_cut_off_is_truncated_and_a_stream_without_its_end_is_told() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"
    replies = iter([head, head + b"0\r\n\r\n"])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(BODY)
        writer.write(next(replies))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    target = Target("127.0.0.1", server.sockets[0].getsockname()[1])
    errors = []
    for _ in range(2):
        client = Client(target)
        (sample,) = await open_loop(client, iter([Shot(0.0, target.request(BODY), True)]))
        errors.append(sample.error)
        await client.close()
    server.close()
    assert errors == ["truncated", "no_done"]


async def test_a_closed_loop_ends_at_its_count(engine: Target) -> None:
    client = Client(engine)
    requests = itertools.repeat((engine.request(BODY), False))
    samples: list[Sample] = await closed_loop(client, requests, concurrency=3, count=20)
    await client.close()
    assert [sample.error for sample in samples] == [""] * 20


async def test_the_three_gateways_answer(children: Processes) -> None:
    stage = build(children, ["bare", "trivial", "extproc"], engines=2)
    for arm in stage.arms.values():
        client = Client(arm.target)
        requests = [
            Shot(0.0, arm.target.request(BODY, reply.header()), bool(reply.chunks))
            for reply in (Reply(), Reply(10))
        ]
        samples = await open_loop(client, iter(requests))
        await client.close()
        assert [(sample.status, sample.error) for sample in samples] == [(200, "")] * 2, arm.name
    for name in ("trivial", "extproc"):
        arm = stage.arms[name]
        assert arm.processor_socket is not None
        cost = await record_cost_s(
            arm.processor_socket, arm.pids["processor"], stage.engine_ports[0], records=50
        )
        assert cost > 0


def test_a_child_that_fails_is_told_with_its_last_words(children: Processes) -> None:
    children.start("broken", python("loadtest.responder", "--port", "nonsense"))
    with pytest.raises(StartError, match="invalid int value"):
        children.wait_for("broken", lambda: False)
