"""OpenTelemetry's wire format of spans (OTLP 1.x, ``opentelemetry/proto/collector/trace/v1/trace_service.proto``).

The fields that we write are declared here, with the numbers of that file, in a pool of their own. The package
``opentelemetry-proto`` cannot be used: it and ``xds-protos`` install different files under the same names, and which of them
survives depends on the order of installation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from extproc.telemetry.spans import Kind, Span, Value

_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "bytes": _FIELD.TYPE_BYTES,
    "string": _FIELD.TYPE_STRING,
    "int64": _FIELD.TYPE_INT64,
    "double": _FIELD.TYPE_DOUBLE,
    "bool": _FIELD.TYPE_BOOL,
    "enum": _FIELD.TYPE_INT32,
    "fixed64": _FIELD.TYPE_FIXED64,
    "fixed32": _FIELD.TYPE_FIXED32,
}
_MESSAGES: Mapping[str, tuple[tuple[int, str, str], ...]] = {
    # (number, name, type); a type in capitals is another message, with * a list of it
    "AnyValue": (
        (1, "string_value", "string"),
        (2, "bool_value", "bool"),
        (3, "int_value", "int64"),
        (4, "double_value", "double"),
    ),
    "KeyValue": ((1, "key", "string"), (2, "value", "AnyValue")),
    "Resource": ((1, "attributes", "KeyValue*"),),
    "Scope": ((1, "name", "string"), (2, "version", "string")),
    "Event": ((1, "time_unix_nano", "fixed64"), (2, "name", "string")),
    "Status": ((2, "message", "string"), (3, "code", "enum")),
    "Span": (
        (1, "trace_id", "bytes"),
        (2, "span_id", "bytes"),
        (4, "parent_span_id", "bytes"),
        (5, "name", "string"),
        (6, "kind", "enum"),
        (7, "start_time_unix_nano", "fixed64"),
        (8, "end_time_unix_nano", "fixed64"),
        (9, "attributes", "KeyValue*"),
        (11, "events", "Event*"),
        (15, "status", "Status"),
        (16, "flags", "fixed32"),
    ),
    "ScopeSpans": ((1, "scope", "Scope"), (2, "spans", "Span*")),
    "ResourceSpans": ((1, "resource", "Resource"), (2, "scope_spans", "ScopeSpans*")),
    "Request": ((1, "resource_spans", "ResourceSpans*"),),
}
_KINDS = {Kind.INTERNAL: 1, Kind.SERVER: 2, Kind.CLIENT: 3}
_ERROR = 2
_SAMPLED = 1


def _request_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="extproc/otlp.proto", package="extproc.otlp", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        alternatives = name == "AnyValue"
        if alternatives:
            message.oneof_decl.add(name="value")
        for number, field, kind in fields:
            many = kind.endswith("*")
            added = message.field.add(
                name=field, number=number, label=_FIELD.LABEL_REPEATED if many else _FIELD.LABEL_OPTIONAL
            )
            if kind in _TYPES:
                added.type = _TYPES[kind]
            else:
                added.type, added.type_name = _FIELD.TYPE_MESSAGE, f".extproc.otlp.{kind.rstrip('*')}"
            if alternatives:
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("extproc.otlp.Request"))


_Request = _request_class()


def encode(spans: Iterable[Span], resource: Mapping[str, Value], version: str, wall_offset_s: float) -> bytes:
    """The body of an export request. ``wall_offset_s``: Unix time minus the spans' clock."""
    request = _Request()
    below = request.resource_spans.add()
    _attributes(below.resource.attributes, resource)
    scope = below.scope_spans.add()
    scope.scope.name, scope.scope.version = "extproc", version
    for span in spans:
        out = scope.spans.add(
            trace_id=span.trace_id.to_bytes(16),
            span_id=span.span_id.to_bytes(8),
            parent_span_id=span.parent_id.to_bytes(8) if span.parent_id else b"",
            name=span.name,
            kind=_KINDS[span.kind],
            start_time_unix_nano=round((span.start_s + wall_offset_s) * 1e9),
            end_time_unix_nano=round((span.end_s + wall_offset_s) * 1e9),
            flags=_SAMPLED,
        )
        _attributes(out.attributes, span.attributes)
        if span.first_token_s is not None:
            out.events.add(
                name="first_token", time_unix_nano=round((span.first_token_s + wall_offset_s) * 1e9)
            )
        if span.error:
            out.status.code, out.status.message = _ERROR, span.error
    return bytes(request.SerializeToString())


def _attributes(out: Any, values: Mapping[str, Value]) -> None:
    for key, value in values.items():
        pair = out.add(key=key)
        if isinstance(value, bool):
            pair.value.bool_value = value
        elif isinstance(value, int):
            pair.value.int_value = value
        elif isinstance(value, float):
            pair.value.double_value = value
        else:
            pair.value.string_value = value
