"""Decisions and rejections as ext_proc messages.

What Envoy is told of a decision: one cluster group an attempt in ``envoy.lb:priority_groups``, the addresses of listed
endpoints in ``envoy.lb:x-gateway-destination-endpoint`` (consumed one an attempt by clusters with the ``override_host``
policy), the same list and the first cluster's name in headers, how often it may retry, and whether on a busy answer (503)
too: Envoy adds ``x-envoy-retry-on`` to what its route says.
All of that depends on the endpoints and the retry budget only, so the finished message is kept and reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envoy.service.ext_proc.v3 import external_processor_pb2 as ep

from extproc.admission.dispatcher import Decision
from extproc.api import errors
from extproc.api.request import Dialect
from extproc.api.splice import splice
from extproc.edge.exchange import Verdict
from extproc.fleet.endpoint import Endpoint
from extproc.routing.identity import CREDENTIALS
from extproc.routing.rejection import Rejection

CLUSTER = "x-gateway-cluster"
DESTINATION = "x-gateway-destination-endpoint"
_MAX_RETRIES = "x-envoy-max-retries"
_RETRY_ON = "x-envoy-retry-on"
_RETRIABLE_STATUS = "x-envoy-retriable-status-codes"
_MOST_KNOWN = 4096


class Answers:
    """Builds messages; remembers the last few thousand endpoint lists."""

    def __init__(self, response_headers: Sequence[str] = ()) -> None:
        self.response_headers = frozenset(response_headers)
        """Which of endpoint, pool, id Envoy shall add to responses."""
        self.tenants = False
        """Clients send keys, which no engine shall see."""
        self.upstream_keys: Mapping[str, str] = {}
        """Pool -> key that its engines want."""
        self._known: dict[object, Verdict] = {}

    def decision(self, decision: Decision) -> Verdict:
        """What Envoy is told of a decision."""
        retried_on = _retried_on(decision)
        key = (decision.pool.name, retried_on, *[id(choice.endpoint.spec) for choice in decision.choices])
        known = self._known.get(key)
        if known is None:
            endpoints = [choice.endpoint for choice in decision.choices]
            mutation = _mutation(endpoints, retried_on)
            self._credentials(mutation, decision.pool.name)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = Verdict(mutation, self._metadata(decision, endpoints))
        own_words = "id" in self.response_headers or decision.response or decision.fallback
        if not own_words and not decision.headers:
            return known
        mutation = _with_headers(known.mutation, decision.headers) if decision.headers else known.mutation
        if not own_words:
            return Verdict(mutation, known.metadata)
        metadata = ep.ProcessingResponse()
        metadata.CopyFrom(known.metadata)
        words = metadata.dynamic_metadata["gateway"]
        if "id" in self.response_headers:
            words["id"] = decision.lease.id
        if decision.fallback:
            words["fallback"] = decision.fallback
        for name, value in decision.response:
            words[name] = value
        return Verdict(mutation, metadata)

    def forget(self) -> None:
        """Endpoints changed: drop what was built from them (keys are object ids, which may be used again)."""
        self._known.clear()

    def _credentials(self, mutation: ep.CommonResponse, pool: str) -> None:
        """The client's key does not go on; the engines' own does."""
        if self.tenants:
            mutation.header_mutation.remove_headers.extend(CREDENTIALS)
        key = self.upstream_keys.get(pool)
        if key is not None:
            _set(mutation, "authorization", f"Bearer {key}")

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


def with_body(verdict: Verdict, body: bytes, *, was_encoded: bool) -> Verdict:
    """The verdict for a replaced body: Envoy demands that content-length changes with it."""
    out = ep.CommonResponse()
    out.CopyFrom(verdict.mutation)
    _set(out, "content-length", str(len(body)))
    if was_encoded:
        out.header_mutation.remove_headers.append("content-encoding")
    return Verdict(out, verdict.metadata)


def _with_headers(mutation: ep.CommonResponse, headers: Sequence[tuple[str, str]]) -> ep.CommonResponse:
    out = ep.CommonResponse()
    out.CopyFrom(mutation)
    for name, value in headers:
        _set(out, name, value)
    return out


def rejection(
    rejected: Rejection, dialect: Dialect, more: Sequence[tuple[str, str]] = ()
) -> ep.ProcessingResponse:
    """An immediate response in the client's dialect, with ``more`` headers. ``details`` begins with ``gateway_``: Envoy
    leaves its body alone.
    """
    body, headers = errors.render(rejected, dialect)
    return immediate(rejected.status, body, [*headers, *more], f"gateway_{rejected.reason}")


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


def _retried_on(decision: Decision) -> str:
    """On what Envoy may try again beside connections that could not be made, which its route says."""
    if not decision.lease.retry_busy:
        return ""
    # A guarded client has nothing of the reply before its first token: a reset until then may be tried elsewhere.
    return "retriable-status-codes,reset" if decision.route.guard is not None else "retriable-status-codes"


def _mutation(endpoints: Sequence[Endpoint], retried_on: str) -> ep.CommonResponse:
    out = ep.CommonResponse(clear_route_cache=True)
    _set(out, CLUSTER, endpoints[0].spec.cluster)
    _set(out, DESTINATION, _listed(endpoints) or endpoints[0].spec.address)
    _set(out, _MAX_RETRIES, str(len(endpoints) - 1))
    if retried_on:
        _set(out, _RETRY_ON, retried_on)
        _set(out, _RETRIABLE_STATUS, "503")
    return out


def _set(out: ep.CommonResponse, name: str, value: str) -> None:
    option = out.header_mutation.set_headers.add()
    option.header.key = name
    option.header.raw_value = value.encode()
    option.append_action = option.OVERWRITE_IF_EXISTS_OR_ADD
