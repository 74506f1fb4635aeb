"""Traces through a real Envoy to a real OTLP/HTTP collector (a stub that decodes what it gets)."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.gateway.echo_engine import EchoEngine
from tests.gateway.envoy_process import free_port, until
from tests.gateway.gateway_process import Lab, chat, cluster, running_lab

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENT = f"00-{TRACE}-{PARENT}-01"


@dataclass
class Collector:
    """Every span it was sent, and the bytes they came in."""

    port: int
    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)
    raw: bytes = b""

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                pair.value.string_value for pair in resource.resource.attributes if pair.key == "service.name"
            }
            # Field 2, whose name depends on the version of the protos that are installed.
            scopes = next(value for field, value in resource.ListFields() if field.number == 2)
            for scope in scopes:
                self.spans += scope.spans
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )

    async def trace(self, trace_id: str, count: int) -> dict[str, Span]:
        """The spans of one trace by name, when so many have come."""

        def found() -> dict[str, Span]:
            return {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}

        async def complete() -> bool:
            return len(found()) >= count

        await until(complete, 15.0, f"{count} spans of a trace")
        return found()


@contextlib.asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    collector = Collector(free_port())
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", collector.port).start()
    try:
        yield collector
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def traced_lab(
    directory: Path, port: int, *, at_once: int | None = None, **tracing: Any
) -> AsyncIterator[Lab]:
    """One engine; ``at_once``: how many requests it may have."""
    settings = {
        "tracing": {"endpoint": f"http://127.0.0.1:{port}", **tracing},
        "admission": {"max_wait": "1s"},
    }

    def clusters(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
        bound = {} if at_once is None else {"max_concurrency": at_once}
        return [cluster(name, engine.address, **bound) for name, engine in engines.items()]

    async with running_lab(directory, ["a"], clusters, settings) as lab:
        yield lab


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with running_collector() as collector:
        yield collector


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def attributes(span: Span) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in span.attributes}


async def test_the_clients_trace_goes_through_the_gateway_to_the_engine(
    tmp_path: Path, collector: Collector
) -> None:
    async with traced_lab(tmp_path, collector.port, sample_ratio=0) as lab:
        status, _, _ = await lab.post(
            chat("my secret plan", stream=True), traceparent=CLIENT, tracestate="v=1"
        )
        assert status == 200
        spans = await collector.trace(TRACE, 7)
        seen = lab["a"].received[-1].headers

    assert set(spans) == {"gateway", "read", "match", "limit", "decide", "engine", "settle"}
    root, engine = spans["gateway"], spans["engine"]
    assert root.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in spans.values() if span is not root} == {root.span_id}
    assert seen["traceparent"] == f"00-{TRACE}-{engine.span_id.hex()}-01"
    assert seen["tracestate"] == "v=1"

    assert (root.kind, engine.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
    assert attributes(root)["http.response.status_code"] == 200
    assert attributes(root)["gateway.pool"] == "pool"
    assert attributes(engine)["gateway.endpoint"].startswith("a/127.0.0.1:")
    assert [event.name for event in engine.events] == ["first_token"]
    order = [spans[name] for name in ("read", "match", "limit", "decide", "engine")]
    assert all(first.end_time_unix_nano <= then.start_time_unix_nano for first, then in pairwise(order))
    assert root.start_time_unix_nano <= order[0].start_time_unix_nano
    assert engine.end_time_unix_nano <= root.end_time_unix_nano
    assert collector.services == {"extproc"}
    assert b"secret" not in collector.raw


async def test_without_a_traceparent_the_ratio_rules(tmp_path: Path, collector: Collector) -> None:
    async with traced_lab(tmp_path, collector.port, sample_ratio=1) as lab:
        await lab.post()
        sent = lab["a"].received[-1].headers["traceparent"].split("-")
        spans = await collector.trace(sent[1], 7)
        assert spans["engine"].span_id.hex() == sent[2]
        assert not spans["gateway"].parent_span_id

        async def counted() -> bool:
            return await lab.extproc.total('extproc_trace_spans_total{result="exported"}') >= 7

        await until(counted, 10.0, "spans counted")


async def test_a_refused_request_is_traced_with_its_reason(tmp_path: Path, collector: Collector) -> None:
    async with traced_lab(tmp_path, collector.port) as lab:
        status, _, _ = await lab.post(chat(model="nobody"), traceparent=CLIENT)
        assert status == 404
        spans = await collector.trace(TRACE, 3)
        assert set(spans) == {"gateway", "read", "match"}
        assert spans["match"].status.code == Status.STATUS_CODE_ERROR
        assert spans["match"].status.message == "model_not_found"
        assert attributes(spans["gateway"])["http.response.status_code"] == 404
        assert b"nobody" not in collector.raw


async def test_the_time_in_the_queue_is_a_span_of_its_own(tmp_path: Path, collector: Collector) -> None:
    async with traced_lab(tmp_path, collector.port, sample_ratio=0, at_once=1) as lab:
        gate = lab["a"].gate = asyncio.Event()
        first = asyncio.create_task(lab.post())
        await until(lambda: lab["a"].active == 1, 5, "the first runs")
        late = CLIENT.replace(TRACE, "a" * 32)
        assert (await lab.post(traceparent=late))[0] == 503, "its deadline passes while the first runs"
        waits = asyncio.create_task(lab.post(traceparent=CLIENT))

        async def waiting() -> bool:
            return await lab.extproc.total("extproc_queue_requests") == 1

        await until(waiting, 5, "the second waits")
        gate.set()
        assert [(await first)[0], (await waits)[0]] == [200, 200]
        refused, served = await collector.trace("a" * 32, 5), await collector.trace(TRACE, 8)

    assert set(refused) == {"gateway", "read", "match", "limit", "queue"}
    assert refused["queue"].status.message == "queue_timeout"
    assert seconds(refused["queue"]) > 0.9
    queue = served["queue"]
    assert served["limit"].end_time_unix_nano <= queue.start_time_unix_nano
    assert queue.end_time_unix_nano <= served["decide"].start_time_unix_nano


async def test_a_client_that_leaves_the_queue_ends_its_trace(tmp_path: Path, collector: Collector) -> None:
    async with traced_lab(tmp_path, collector.port, sample_ratio=0, at_once=1) as lab:
        gate = lab["a"].gate = asyncio.Event()
        first = asyncio.create_task(lab.post())
        await until(lambda: lab["a"].active == 1, 5, "the first runs")
        leaving = asyncio.create_task(lab.post(traceparent=CLIENT))

        async def waiting() -> bool:
            return await lab.extproc.total("extproc_queue_requests") == 1

        await until(waiting, 5, "the second waits")
        leaving.cancel()
        spans = await collector.trace(TRACE, 5)
        gate.set()
        assert (await first)[0] == 200
    assert attributes(spans["gateway"])["gateway.reason"] == "client_gone"
    assert set(spans) == {"gateway", "read", "match", "limit", "queue"}


async def test_what_is_not_traced_passes_unchanged(tmp_path: Path, collector: Collector) -> None:
    async with traced_lab(tmp_path, collector.port, sample_ratio=0) as lab:
        unsampled = CLIENT[:-2] + "00"
        await lab.post(traceparent=unsampled)
        assert lab["a"].received[-1].headers["traceparent"] == unsampled
        await lab.post()
        assert "traceparent" not in lab["a"].received[-1].headers
        await lab.extproc.idle()
        assert not collector.spans


async def test_a_collector_that_is_away_costs_requests_nothing(tmp_path: Path) -> None:
    async with traced_lab(tmp_path, free_port(), sample_ratio=1) as lab:
        for _ in range(20):
            assert (await lab.post())[0] == 200
        await lab.extproc.idle()


async def test_traces_are_sent_at_the_end(tmp_path: Path, collector: Collector) -> None:
    async with traced_lab(tmp_path, collector.port, sample_ratio=1) as lab:
        await lab.post()
        await lab.extproc.idle()
    assert {span.name for span in collector.spans} >= {"gateway", "engine", "settle"}
