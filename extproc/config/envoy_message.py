"""Envoy's YAML -> Envoy's protobuf messages, with every typo found at its line.

Envoy itself accepts unknown fields in the files it reads at run time and silently does without them, so the
check must be ours. The field names and types are those of the ``xds-protos`` package.

Rules of this file:

- field names may be ``snake_case`` or ``camelCase``, as in Envoy;
- an unknown field is a problem; so is a value of the wrong type, and an enum value that does not exist;
- a typed extension (``@type``) that ``xds-protos`` does not know is passed on unread, with a warning.
"""

from __future__ import annotations

import difflib
import importlib
import re
from typing import Any

from google.protobuf import descriptor_pool, json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from extproc.config.problem import Problem
from extproc.config.yaml_source import Document, NodePath

_EXTENSIONS = (
    "upstreams.http.v3.http_protocol_options",
    "transport_sockets.tls.v3.tls",
    "transport_sockets.raw_buffer.v3.raw_buffer",
    "transport_sockets.proxy_protocol.v3.upstream_proxy_protocol",
    "load_balancing_policies.override_host.v3.override_host",
    "load_balancing_policies.least_request.v3.least_request",
    "load_balancing_policies.round_robin.v3.round_robin",
    "load_balancing_policies.random.v3.random",
    "load_balancing_policies.ring_hash.v3.ring_hash",
    "load_balancing_policies.maglev.v3.maglev",
    "load_balancing_policies.pick_first.v3.pick_first",
    "load_balancing_policies.wrr_locality.v3.wrr_locality",
    "load_balancing_policies.client_side_weighted_round_robin.v3.client_side_weighted_round_robin",
    "load_balancing_policies.cluster_provided.v3.cluster_provided",
    "load_balancing_policies.subset.v3.subset",
    "clusters.aggregate.v3.cluster",
    "clusters.dns.v3.dns_cluster",
    "clusters.dynamic_forward_proxy.v3.cluster",
    "network.dns_resolver.cares.v3.cares_dns_resolver",
)
"""Modules whose import makes the extensions that clusters use known to the descriptor pool."""

_NEWER = {"envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost": {"selected_host_key"}}
"""Fields of Envoy 1.40 that ``xds-protos`` does not have yet, by message."""

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_BOUNDS = {"envoy.config.core.v3.SocketAddress.port_value": (1, 65_535)}
"""Fields whose values are bound more tightly than their type."""
_DURATION = re.compile(r"-?\d+(\.\d{1,9})?s")
_FREE_FORM = frozenset(
    f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue", "Timestamp", "FieldMask")
)


def load_extensions() -> None:
    """Make the typed extensions of clusters known. Cheap after the first time."""
    for name in _EXTENSIONS:
        importlib.import_module(f"envoy.extensions.{name}_pb2")


def parse(document: Document, path: NodePath, data: object, message: Message) -> list[Problem]:
    """Fill ``message`` from ``data``, which stands at ``path`` in the document.

    Returns every problem found; if one of them is fatal, the message's content is undefined.
    """
    load_extensions()
    reader = _Reader(document)
    kept = reader.message(data, message.DESCRIPTOR, path)
    if not any(problem.fatal for problem in reader.problems):
        try:
            json_format.ParseDict(kept, message)
        except KeyError as error:
            # The parser's own word for a well-known type in an `Any` without its `value`.
            reader.report(path, f"Envoy would refuse this: a key {error} is missing")
        except (json_format.ParseError, TypeError, ValueError) as error:
            reader.report(path, f"Envoy would refuse this: {str(error).splitlines()[0]}")
    return reader.problems


def field(data: object, name: str) -> tuple[str, Any]:
    """``(key as written, value)`` of the field ``name`` in either spelling; ``(name, None)`` when absent."""
    if isinstance(data, dict):
        for key in (name, _camel(name)):
            if data.get(key) is not None:
                return key, data[key]
    return name, None


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word[:1].upper() + word[1:] for word in rest)


def did_you_mean(word: str, known: list[str]) -> str:
    """A hint to append to a message; empty when nothing comes near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean `{near[0]}`?" if near else ""


class _Reader:
    """Walks data beside a message descriptor; returns what the protobuf parser should see."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []

    def report(self, path: NodePath, message: str, *, fatal: bool = True) -> None:
        self.problems.append(self.document.problem(path, message, fatal=fatal))

    def message(self, data: object, kind: Any, path: NodePath) -> Any:
        if kind.full_name in _FREE_FORM:
            if kind.full_name == "google.protobuf.Struct" and not isinstance(data, dict):
                self.report(path, f"`{_last(path)}` must hold keys with values")
            return data
        if kind.full_name == "google.protobuf.Any":
            return self._any(data, path)
        if kind.full_name == "google.protobuf.Duration":
            if not (isinstance(data, str) and _DURATION.fullmatch(data)):
                self.report(
                    path, f"`{_last(path)}` must be a duration such as `1s` or `0.25s`, not {_shown(data)}"
                )
            return data
        if kind.full_name.startswith("google.protobuf.") and kind.full_name.endswith("Value"):
            return self._scalar(data, kind.fields_by_name["value"], path)
        if not isinstance(data, dict):
            self.report(path, f"`{_last(path)}` must hold keys with values, not {_shown(data)}")
            return data
        return self._fields(data, kind, path)

    def _fields(self, data: dict[str, Any], kind: Any, path: NodePath) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in data.items():
            if key in _NEWER.get(kind.full_name, ()):
                continue
            found = kind.fields_by_name.get(key) or kind.fields_by_camelcase_name.get(key)
            if found is None:
                hint = did_you_mean(key, [item.name for item in kind.fields])
                self.report((*path, key), f"Envoy's {kind.name} has no field `{key}`{hint}")
            elif value is not None:
                kept[key] = self._value(value, found, (*path, key))
        return kept

    def _value(self, value: object, found: FieldDescriptor, path: NodePath) -> Any:
        kind = found.message_type
        if kind is not None and kind.GetOptions().map_entry:
            if not isinstance(value, dict):
                self.report(path, f"`{_last(path)}` must hold keys with values, not {_shown(value)}")
                return value
            inner = kind.fields_by_name["value"]
            return {key: self._single(item, inner, (*path, key)) for key, item in value.items()}
        if found.is_repeated:
            if not isinstance(value, list):
                self.report(
                    path, f"`{_last(path)}` must be a list (lines that begin with `- `), not {_shown(value)}"
                )
                return value
            return [self._single(item, found, (*path, index)) for index, item in enumerate(value)]
        return self._single(value, found, path)

    def _single(self, value: object, found: FieldDescriptor, path: NodePath) -> Any:
        if found.message_type is not None:
            return self.message(value, found.message_type, path)
        return self._scalar(value, found, path)

    def _scalar(self, value: object, found: FieldDescriptor, path: NodePath) -> Any:
        kind = found.cpp_type
        wanted = ""
        if kind in _INTEGERS:
            low, high = _BOUNDS.get(found.full_name) or _INTEGERS[kind]
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                wanted = f"a whole number from {low} to {high}"
        elif kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                wanted = "a number"
        elif kind == FieldDescriptor.CPPTYPE_BOOL:
            if not isinstance(value, bool):
                wanted = "true or false"
        elif kind == FieldDescriptor.CPPTYPE_ENUM:
            names = [item.name for item in found.enum_type.values] if found.enum_type else []
            if value not in names and (isinstance(value, bool) or not isinstance(value, int)):
                self.report(
                    path, f"`{_last(path)}` cannot be {_shown(value)}; write one of {', '.join(names)}"
                )
        elif not isinstance(value, str):
            wanted = "text (put it in quotes)"
        if wanted:
            self.report(path, f"`{_last(path)}` must be {wanted}, not {_shown(value)}")
        return value

    def _any(self, data: object, path: NodePath) -> Any:
        nothing = {"@type": "type.googleapis.com/google.protobuf.Empty"}
        url = data.get("@type") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(url, str):
            self.report(path, f'`{_last(path)}` needs an "@type" that says what it is')
            return nothing
        name = url.rpartition("/")[2]
        try:
            kind = descriptor_pool.Default().FindMessageTypeByName(name)
        except KeyError:
            self.report(path, f"`{name}` is not known to this check; it goes to Envoy unread", fatal=False)
            return nothing
        rest = {key: value for key, value in data.items() if key != "@type"}
        if kind.full_name.startswith("google.protobuf."):
            return data
        return {"@type": url, **self._fields(rest, kind, path)}


def _last(path: NodePath) -> str:
    """The nearest key, for messages."""
    return next((step for step in reversed(path) if isinstance(step, str)), "the file")


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "keys with values"
    if isinstance(value, list):
        return "a list"
    return f"`{str(value)[:60]}`"
