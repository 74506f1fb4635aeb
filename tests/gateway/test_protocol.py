"""extproc before other gateways: a gRPC client that speaks like them, and an Envoy that is configured otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ep_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from extproc.edge.bootstrap import connection_manager
from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Extproc, Lab, chat, cluster, running_extproc, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUFFERED, PARTIAL = ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL
STREAMED, DUPLEX = ProcessingMode.STREAMED, ProcessingMode.FULL_DUPLEX_STREAMED
LARGE = 70 << 20


class Stub:
    """Opens streams as a gateway does."""

    def __init__(self, directory: Path) -> None:
        options = [("grpc.max_receive_message_length", LARGE), ("grpc.max_send_message_length", LARGE)]
        self.channel = grpc.aio.insecure_channel(f"unix:{directory}/live/p.sock", options=options)
        self._stub = ep_grpc.ExternalProcessorStub(self.channel)

    def stream(self) -> Any:
        return self._stub.Process()


def head(
    mode: Any = None,
    *,
    end: bool = False,
    path: str = "/v1/chat/completions",
    response_mode: Any = ProcessingMode.NONE,
    early: bool = False,
    **extra: str,
) -> ep.ProcessingRequest:
    message = ep.ProcessingRequest()
    pairs = {":method": "GET" if end else "POST", ":path": path, "content-type": "application/json"}
    for key, value in {**pairs, **{k.replace("_", "-"): v for k, v in extra.items()}}.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    message.request_headers.end_of_stream = end
    if mode is not None:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = response_mode
        message.protocol_config.send_body_without_waiting_for_header_response = early
    return message


def body(data: bytes, end: bool = True) -> ep.ProcessingRequest:
    return ep.ProcessingRequest(request_body=ep.HttpBody(body=data, end_of_stream=end))


def response_headers(status: str = "200") -> ep.ProcessingRequest:
    message = ep.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    return message


def response_body(data: bytes, end: bool) -> ep.ProcessingRequest:
    return ep.ProcessingRequest(response_body=ep.HttpBody(body=data, end_of_stream=end))


async def read(call: Any) -> Any:
    async with asyncio.timeout(5):
        return await call.read()


def chosen(common: ep.CommonResponse) -> str:
    headers = {h.header.key: h.header.raw_value.decode() for h in common.header_mutation.set_headers}
    assert common.clear_route_cache
    assert headers["x-gateway-cluster"] in ("a", "b")
    return headers["x-gateway-destination-endpoint"]


def destination(answer: ep.ProcessingResponse) -> str:
    """The endpoint that dynamic metadata names, as the endpoint-picker protocol wants it."""
    balance = answer.dynamic_metadata["envoy.lb"]
    groups = [g["clusters"][0]["cluster_name"] for g in balance["priority_groups"]]
    assert sorted(groups) == ["a", "b"]
    return str(groups[0])


CLUSTERS = [cluster("a", "127.0.0.1:1001"), cluster("b", "127.0.0.1:1002")]
SLOW = {"scrape": {"interval": 3600}}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def alone(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Extproc, Stub]]:
    directory = tmp_path_factory.mktemp("alone")
    async with running_extproc(directory, CLUSTERS, SLOW) as extproc:
        stub = Stub(directory)
        yield extproc, stub
        await stub.channel.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def staying(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Extproc, Stub]]:
    directory = tmp_path_factory.mktemp("staying")
    async with running_extproc(directory, CLUSTERS, {**SLOW, "feedback": "stream"}) as extproc:
        stub = Stub(directory)
        yield extproc, stub
        await stub.channel.close()


Parts = tuple[Extproc, Stub]


class TestRequestModes:
    """The stream ends after the answer: the gateway goes on by itself."""

    async def test_buffered(self, alone: Parts) -> None:
        call = alone[1].stream()
        await call.write(head(BUFFERED))
        first = await read(call)
        assert first.WhichOneof("response") == "request_headers"
        assert not first.request_headers.response.header_mutation.set_headers
        await call.write(body(chat()))
        answer = await read(call)
        assert chosen(answer.request_body.response).startswith("127.0.0.1:100")
        assert destination(answer) in ("a", "b")
        assert not answer.request_body.response.HasField("body_mutation")
        assert await read(call) is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK

    async def test_without_protocol_config_it_is_buffered(self, alone: Parts) -> None:
        call = alone[1].stream()
        await call.write(head())
        assert (await read(call)).WhichOneof("response") == "request_headers"
        await call.write(body(chat()))
        chosen((await read(call)).request_body.response)
        call.cancel()

    async def test_buffered_with_trailers(self, alone: Parts) -> None:
        call = alone[1].stream()
        await call.write(head(BUFFERED))
        await read(call)
        await call.write(body(chat(), end=False))
        chosen((await read(call)).request_body.response)
        assert await read(call) is grpc.aio.EOF

    async def test_buffered_partial_decides_by_the_part_it_sees(self, alone: Parts) -> None:
        call = alone[1].stream()
        await call.write(head(PARTIAL))
        await read(call)
        await call.write(body(chat("x" * 100_000)[:50_000], end=False))
        answer = await read(call)
        chosen(answer.request_body.response)
        assert not answer.request_body.response.HasField("body_mutation")
        call = alone[1].stream()
        await call.write(head(PARTIAL))
        await read(call)
        await call.write(body(chat("x" * 100, model="nobody-serves-this")[:80], end=False))
        assert (await read(call)).immediate_response.status.code == 404

    async def test_streamed_decides_on_headers(self, alone: Parts) -> None:
        call = alone[1].stream()
        await call.write(head(STREAMED))
        chosen((await read(call)).request_headers.response)
        assert await read(call) is grpc.aio.EOF

    async def test_streamed_without_waiting_decides_on_the_body(self, alone: Parts) -> None:
        call = alone[1].stream()
        await call.write(head(STREAMED, early=True))
        data = chat(model="nobody-serves-this")
        await call.write(body(data[:20], end=False))
        await call.write(body(data[20:]))
        answer = await read(call)
        assert answer.immediate_response.status.code == 404

    @pytest.mark.parametrize("size", [10, 300_000])
    async def test_full_duplex_gives_every_byte_back(self, alone: Parts, size: int) -> None:
        call = alone[1].stream()
        data = chat("x" * size)
        await call.write(head(DUPLEX))
        for start in range(0, len(data), 60_000):
            await call.write(body(data[start : start + 60_000], end=start + 60_000 >= len(data)))
        answer = await read(call)
        chosen(answer.request_headers.response)
        destination(answer)
        given = b""
        while (part := await read(call)) is not grpc.aio.EOF:
            streamed = part.request_body.response.body_mutation.streamed_response
            given += streamed.body
            assert len(streamed.body) <= 64 * 1024
            last = streamed.end_of_stream
        assert (given, last) == (data, True)

    async def test_full_duplex_with_trailers(self, alone: Parts) -> None:
        call = alone[1].stream()
        await call.write(head(DUPLEX))
        await call.write(body(chat(), end=False))
        await call.write(ep.ProcessingRequest(request_trailers=ep.HttpTrailers()))
        parts = []
        while (part := await read(call)) is not grpc.aio.EOF:
            parts.append(part)
        assert [p.WhichOneof("response") for p in parts] == [
            "request_headers",
            "request_body",
            "request_trailers",
        ]
        assert not parts[1].request_body.response.body_mutation.streamed_response.end_of_stream

    @pytest.mark.parametrize("mode", [BUFFERED, PARTIAL, STREAMED, DUPLEX])
    async def test_no_body_at_all(self, alone: Parts, mode: Any) -> None:
        call = alone[1].stream()
        await call.write(head(mode, end=True, path="/v1/responses/x"))
        chosen((await read(call)).request_headers.response)
        assert await read(call) is grpc.aio.EOF

    async def test_an_upgrade_does_not_wait_for_a_body(self, alone: Parts) -> None:
        call = alone[1].stream()
        await call.write(head(BUFFERED, upgrade="websocket", connection="Upgrade"))
        chosen((await read(call)).request_headers.response)


class TestOddStreams:
    async def test_nonsense_is_an_error_of_ours_at_once(self, alone: Parts) -> None:
        call = alone[1].stream()
        await call.write(ep.ProcessingRequest())
        answer = await read(call)
        assert answer.immediate_response.status.code == 500
        assert json.loads(answer.immediate_response.body)["error"]["code"] == "internal_error"

    async def test_a_body_before_headers(self, alone: Parts) -> None:
        call = alone[1].stream()
        await call.write(body(b"{}"))
        assert (await read(call)).immediate_response.status.code == 500

    async def test_an_empty_stream(self, alone: Parts) -> None:
        call = alone[1].stream()
        await call.done_writing()
        assert await read(call) is grpc.aio.EOF

    async def test_a_message_of_64_mib(self, alone: Parts) -> None:
        call = alone[1].stream()
        await call.write(head(BUFFERED))
        await read(call)
        await call.write(body(chat("x" * ((64 << 20) - 1000))))
        async with asyncio.timeout(20):
            chosen((await call.read()).request_body.response)

    async def test_cancelled_ones_leave_nothing(self, alone: Parts) -> None:
        extproc, stub = alone
        before = await extproc.metrics()

        async def one(number: int) -> None:
            call = stub.stream()
            await call.write(head(BUFFERED))
            if number % 3:
                await read(call)
            if number % 3 == 2:
                await call.write(body(chat("x" * 1000)[:-1], end=False))
            call.cancel()

        for start in range(0, 300, 50):
            await asyncio.gather(*(one(start + n) for n in range(50)))

        async def quiet() -> bool:
            samples = await extproc.metrics()
            return samples["extproc_streams_in_flight"] == samples["extproc_buffered_bytes"] == 0

        await until(quiet, 10, "no stream is open")
        after = await extproc.metrics()
        assert after["extproc_streams_failed_total"] == before["extproc_streams_failed_total"]


class TestFeedbackByStream:
    @pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
    async def test_the_lease_lives_as_long_as_the_stream(self, staying: Parts, mode: Any) -> None:
        extproc, stub = staying
        call = stub.stream()
        await call.write(head(mode, response_mode=mode))
        if mode == BUFFERED:
            await read(call)
        await call.write(body(chat(stream=True)))
        answer = await read(call)
        if mode == DUPLEX:
            assert (await read(call)).request_body.response.body_mutation.streamed_response.end_of_stream
        assert destination(answer) in ("a", "b")
        assert (await extproc.metrics())["extproc_leases"] == 1
        await call.write(response_headers())
        assert (await read(call)).WhichOneof("response") == "response_headers"
        for data, end in ((b"data: 1\n\n", False), (b"data: [DONE]\n\n", True)):
            await call.write(response_body(data, end))
            part = await read(call)
            assert part.WhichOneof("response") == "response_body"
            if mode == DUPLEX:
                streamed = part.response_body.response.body_mutation.streamed_response
                assert (streamed.body, streamed.end_of_stream) == (data, end)
        await call.done_writing()
        assert await read(call) is grpc.aio.EOF
        await extproc.idle()
        outcome = (await extproc.get("/decisions?count=1"))["decisions"][0]["outcome"]
        assert (outcome["outcome"], outcome["status"]) == ("success", 200)
        assert outcome["ttft_s"] is not None

    async def test_a_stream_that_breaks_closes_it_too(self, staying: Parts) -> None:
        extproc, stub = staying
        call = stub.stream()
        await call.write(head(BUFFERED))
        await read(call)
        await call.write(body(chat()))
        await read(call)
        assert (await extproc.metrics())["extproc_leases"] == 1
        call.cancel()
        await extproc.idle()
        outcome = (await extproc.get("/decisions?count=1"))["decisions"][0]["outcome"]
        assert outcome["outcome"] == "neutral"

    async def test_a_500_of_the_engine_is_its_fault(self, staying: Parts) -> None:
        extproc, stub = staying
        call = stub.stream()
        await call.write(head(end=True, path="/x"))
        await read(call)
        message = response_headers("500")
        message.response_headers.end_of_stream = True
        await call.write(message)
        await read(call)
        await call.done_writing()
        assert await read(call) is grpc.aio.EOF
        await extproc.idle()
        outcome = (await extproc.get("/decisions?count=1"))["decisions"][0]["outcome"]
        assert outcome["outcome"] == "failure"


class TestTheServer:
    async def test_health(self, alone: Parts) -> None:
        health = health_pb2_grpc.HealthStub(alone[1].channel)
        for service in (
            *("", "liveness", "readiness"),
            "envoy.service.ext_proc.v3.ExternalProcessor",
        ):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING, service

    async def test_reflection(self, alone: Parts) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(alone[1].channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        reply = await call.read()
        names = {service.name for service in reply.list_services_response.service}
        assert "envoy.service.ext_proc.v3.ExternalProcessor" in names
        await call.done_writing()


def full_duplex(response: str | None) -> Any:
    """An Envoy as others configure it: every body streamed both ways through us, no access log for us."""

    def change(document: dict[str, Any]) -> None:
        manager = connection_manager(document)
        del manager["access_log"], manager["access_log_options"]
        filters = manager["http_filters"]
        deciding = next(item for item in filters if item["name"] == "envoy.filters.http.ext_proc")
        mode = deciding["typed_config"]["processing_mode"]
        mode |= {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"}
        mode |= {"response_header_mode": "SEND"}
        if response is not None:
            mode |= {"response_body_mode": response, "response_trailer_mode": "SEND"}
        router = filters[-1]["typed_config"]
        router.pop("upstream_log", None)

    return change


@contextlib.asynccontextmanager
async def other_envoy(directory: Path, response: str | None) -> AsyncIterator[Lab]:
    settings = {"feedback": "stream", "pools": {"pool": {"aliases": {"alias": "m"}}}}
    async with running_lab(directory, ("a", "b"), settings=settings, change=full_duplex(response)) as running:
        yield running


@pytest.mark.parametrize("response", ["FULL_DUPLEX_STREAMED", "STREAMED", None])
async def test_an_envoy_in_full_duplex_without_an_access_log(tmp_path: Path, response: str | None) -> None:
    async with other_envoy(tmp_path, response) as lab:
        for engine in lab.engines.values():
            engine.chunks = 20
        statuses = await asyncio.gather(*(lab.post(chat(f"{n}", stream=True)) for n in range(20)))
        for status, _, reply in statuses:
            assert (status, reply.count(b"data: ")) == (200, 22)
        assert lab["a"].begun + lab["b"].begun == 20
        assert min(lab["a"].begun, lab["b"].begun) >= 5
        await lab.extproc.idle()
        for size in (10, 100_000, 5 << 20):
            for model in ("m", "alias"):
                await lab.settled()
                assert (await lab.post(chat("y" * size, model=model)))[0] == 200
                (received,) = [item for engine in lab.engines.values() for item in engine.posts]
                assert received.body == chat("y" * size)
        await lab.extproc.idle()
        for engine in lab.engines.values():
            engine.chunks, engine.gate = 2, asyncio.Event()
        running = asyncio.create_task(lab.post(chat(stream=True)))
        await until(lambda: lab["a"].active + lab["b"].active == 1, 5, "one runs")
        # An Envoy that shows no response body ends the stream after the headers, and the lease with it.
        assert (await lab.extproc.metrics())["extproc_leases"] == (0 if response is None else 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await lab.extproc.idle()
        fleet: Mapping[str, Any] = await lab.extproc.fleet()
        leases: Sequence[int] = [row["leases"] for row in fleet.values()]
        assert leases == [0, 0]
        status, _, reply = await lab.post(chat(model="nobody-serves-this"))
        assert (status, json.loads(reply)["error"]["code"]) == (404, "model_not_found")
