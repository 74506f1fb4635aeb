"""Reads Envoy's typed token usage of a JSON reply (``envoy.data.ai.v3.TokenUsage``).

The message is newer than the protos we install, so the few fields that we read are declared here; their numbers are those
of Envoy 1.40 (descriptor in its binary). Unknown fields are skipped by protobuf, so later versions read the same.
"""

from __future__ import annotations

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2
from google.protobuf.message import DecodeError

from extproc.outcome import Usage

TYPE_NAME = "envoy.data.ai.v3.TokenUsage"

_FAILED = 3
_MOST = 2**31 - 1
"""Tokens; an engine that tells more does not know its count."""


def _message_class() -> type:
    file = descriptor_pb2.FileDescriptorProto(
        name="extproc/token_usage.proto",
        package="extproc.read",
        syntax="proto3",
        dependency=["google/protobuf/wrappers.proto"],
    )
    details = file.message_type.add(name="InputTokenDetails")
    usage = file.message_type.add(name="TokenUsage")
    number = descriptor_pb2.FieldDescriptorProto
    for message, name, index in (
        (details, "cached_tokens", 1),
        (usage, "input_tokens", 3),
        (usage, "output_tokens", 4),
    ):
        message.field.add(
            name=name,
            number=index,
            type=number.TYPE_MESSAGE,
            label=number.LABEL_OPTIONAL,
            type_name=".google.protobuf.UInt64Value",
        )
    usage.field.add(
        name="input_token_details",
        number=6,
        type=number.TYPE_MESSAGE,
        label=number.LABEL_OPTIONAL,
        type_name=".extproc.read.InputTokenDetails",
    )
    usage.field.add(name="extraction_status", number=9, type=number.TYPE_INT32, label=number.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    wrappers = descriptor_pb2.FileDescriptorProto()
    wrappers_pb2.DESCRIPTOR.CopyToProto(wrappers)
    pool.Add(wrappers)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("extproc.read.TokenUsage"))


_TokenUsage = _message_class()


def read(value: bytes) -> Usage | None:
    """Usage from the serialized message; None when Envoy could not find any or the bytes are not such a message."""
    message = _TokenUsage()
    try:
        message.ParseFromString(value)
    except DecodeError:
        return None
    if message.extraction_status == _FAILED:
        return None
    details = message.input_token_details
    return Usage(
        believed(message.input_tokens.value) if message.HasField("input_tokens") else None,
        believed(message.output_tokens.value) if message.HasField("output_tokens") else None,
        believed(details.cached_tokens.value) if details.HasField("cached_tokens") else None,
    )


def believed(count: float) -> int | None:
    """A count as an engine told it; None (unknown) for one that cannot be: negative, absurdly large, not a number."""
    return int(count) if 0 <= count <= _MOST else None
