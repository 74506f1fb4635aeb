"""Decisions and rejections as ext_proc messages.

What Envoy is told of a decision: one cluster group an attempt in ``envoy.lb:priority_groups``, the addresses of listed endpoints in ``envoy.lb:x-gateway-destination-endpoint`` (consumed one an attempt by clusters with
the ``override_host`` policy), the same list and the first cluster's name in headers, and how often it may retry.
All of that depends on the endpoints only, so the finished message is kept and reused.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachetools import LRUCache
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep

from extproc.admission.dispatcher import Decision
from extproc.api import errors
from extproc.api.request import Dialect
from extproc.api.splice import splice
from extproc.fleet.endpoint import Endpoint
from extproc.routing.rejection import Rejection

CLUSTER = "x-gateway-cluster"
DESTINATION = "x-gateway-destination-endpoint"
_MAX_RETRIES = "x-envoy-max-retries"


class Answers:
    """Builds messages; remembers the last few thousand endpoint lists."""

    def __init__(self, response_headers: Sequence[str] = ()) -> None:
        self.response_headers = frozenset(response_headers)
        """Which of endpoint, pool, id Envoy shall add to responses."""
        self._known: LRUCache[object, tuple[ep.CommonResponse, ep.ProcessingResponse]] = LRUCache(4096)

    def decision(self, decision: Decision) -> tuple[ep.CommonResponse, ep.ProcessingResponse]:
        """Header mutation, and a response that carries the dynamic metadata."""
        endpoints = [choice.endpoint for choice in decision.choices]
        key = (decision.pool.name, *(id(endpoint.spec) for endpoint in endpoints))
        known = self._known.get(key)
        if known is None:
            known = (_mutation(endpoints), self._metadata(decision, endpoints))
            self._known[key] = known
        mutation, template = known
        if decision.headers:
            mutation = _with_headers(mutation, decision.headers)
        if "id" not in self.response_headers:
            return mutation, template
        metadata = ep.ProcessingResponse()
        metadata.CopyFrom(template)
        metadata.dynamic_metadata["gateway"]["id"] = decision.lease.id
        return mutation, metadata

    def forget(self) -> None:
        """Endpoints changed: drop what was built from them (keys are object ids, which may be used again)."""
        self._known.clear()

    def _metadata(self, decision: Decision, endpoints: Sequence[Endpoint]) -> ep.ProcessingResponse:
        out = ep.ProcessingResponse()
        balance: dict[str, object] = {
            "priority_groups": [
                {"name": str(place), "clusters": [{"cluster_name": endpoint.spec.cluster, "weight": 1}]}
                for place, endpoint in enumerate(endpoints, 1)
            ]
        }
        listed = _listed(endpoints)
        if listed:
            balance[DESTINATION] = listed
        shown = {"endpoint": endpoints[0].key, "pool": decision.pool.name}
        out.dynamic_metadata.update(
            {
                "envoy.lb": balance,
                "gateway": {name: value for name, value in shown.items() if name in self.response_headers},
            }
        )
        return out


def spliced(
    decision: Decision, sent: bytes, plain: bytes | None, span: tuple[int, int] | None
) -> bytes | None:
    """The body with the decision's model name, or None when the client's bytes go on as they are."""
    if decision.splice is None or span is None:
        return None
    return splice(sent if plain is None else plain, span, decision.splice)


def with_body(mutation: ep.CommonResponse, body: bytes, *, was_encoded: bool) -> ep.CommonResponse:
    """The mutation for a replaced body: Envoy demands that content-length changes with it."""
    out = ep.CommonResponse()
    out.CopyFrom(mutation)
    _set(out, "content-length", str(len(body)))
    if was_encoded:
        out.header_mutation.remove_headers.append("content-encoding")
    return out


def _with_headers(mutation: ep.CommonResponse, headers: Sequence[tuple[str, str]]) -> ep.CommonResponse:
    out = ep.CommonResponse()
    out.CopyFrom(mutation)
    for name, value in headers:
        _set(out, name, value)
    return out


def rejection(rejected: Rejection, dialect: Dialect) -> ep.ProcessingResponse:
    """An immediate response in the client's dialect. ``details`` begins with ``gateway_``: Envoy leaves its body alone."""
    body, headers = errors.render(rejected, dialect)
    return immediate(rejected.status, body, headers, f"gateway_{rejected.reason}")


def immediate(
    status: int, body: bytes, headers: Sequence[tuple[str, str]], details: str
) -> ep.ProcessingResponse:
    """A reply made by us; no engine is involved."""
    out = ep.ProcessingResponse()
    reply = out.immediate_response
    reply.status.code = status
    reply.body = body
    reply.details = details
    for name, value in headers:
        option = reply.headers.set_headers.add()
        option.header.key = name
        option.header.raw_value = value.encode()
        option.append_action = option.OVERWRITE_IF_EXISTS_OR_ADD
    return out


def _listed(endpoints: Sequence[Endpoint]) -> str:
    return ",".join(endpoint.spec.address for endpoint in endpoints if endpoint.spec.listed)


def _mutation(endpoints: Sequence[Endpoint]) -> ep.CommonResponse:
    out = ep.CommonResponse(clear_route_cache=True)
    _set(out, CLUSTER, endpoints[0].spec.cluster)
    _set(out, DESTINATION, _listed(endpoints) or endpoints[0].spec.address)
    _set(out, _MAX_RETRIES, str(len(endpoints) - 1))
    return out


def _set(out: ep.CommonResponse, name: str, value: str) -> None:
    option = out.header_mutation.set_headers.add()
    option.header.key = name
    option.header.raw_value = value.encode()
    option.append_action = option.OVERWRITE_IF_EXISTS_OR_ADD
