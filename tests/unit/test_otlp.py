"""Spans as OTLP, read back with the messages that xds-protos brings (an older OTLP, of the same numbers)."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from extproc.edge.otlp import encode
from extproc.edge.traces import TraceExporter
from extproc.telemetry.spans import Kind, Span

TRACE, ROOT, CHILD = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, 7
SPANS = (
    Span("gateway", Kind.SERVER, TRACE, ROOT, 0, 1.0, 2.5, {"text": "x", "n": 3, "share": 0.5, "yes": True}),
    Span("engine", Kind.CLIENT, TRACE, CHILD, ROOT, 1.2, 2.4, {}, "reset", 1.5),
)


def read_back() -> tuple[Any, list[Any]]:
    request = ExportTraceServiceRequest.FromString(encode(SPANS, {"service.name": "extproc"}, "1.2", 1000.0))
    (below,) = request.resource_spans
    # Field 2, whose name depends on the version of the protos.
    (scope,) = next(value for field, value in below.ListFields() if field.number == 2)
    return below.resource, list(scope.spans)


def test_identities_are_bytes_and_a_root_has_no_parent() -> None:
    _, (root, engine) = read_back()
    assert root.trace_id.hex() == engine.trace_id.hex() == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert (root.span_id.hex(), root.parent_span_id) == ("00f067aa0ba902b7", b"")
    assert engine.parent_span_id == root.span_id


def test_times_are_unix_nanoseconds() -> None:
    _, (root, engine) = read_back()
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (1_001_000_000_000, 1_002_500_000_000)
    assert [(event.name, event.time_unix_nano) for event in engine.events] == [
        ("first_token", 1_001_500_000_000)
    ]


def test_attributes_keep_their_types() -> None:
    resource, (root, _) = read_back()
    assert {pair.key: pair.value.WhichOneof("value") for pair in root.attributes} == {
        "text": "string_value",
        "n": "int_value",
        "share": "double_value",
        "yes": "bool_value",
    }
    assert resource.attributes[0].value.string_value == "extproc"


def test_kinds_and_errors() -> None:
    _, (root, engine) = read_back()
    assert (root.kind, engine.kind) == (2, 3)
    assert (root.HasField("status"), engine.status.code, engine.status.message) == (False, 2, "reset")


def test_what_does_not_fit_into_the_queue_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TraceExporter, "_run", lambda self: None)
    exporter = TraceExporter("http://127.0.0.1:9/v1/traces", queued=2)
    for _ in range(5):
        exporter.finished(SPANS)
    assert exporter.counts == {"exported": 0, "failed": 0, "dropped": 6}


def test_headers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc, x-team = llm")
    monkeypatch.setattr(TraceExporter, "_run", lambda self: None)
    exporter = TraceExporter("http://127.0.0.1:9/v1/traces")
    assert exporter._headers["authorization"] == "Bearer abc"
    assert exporter._headers["x-team"] == "llm"
