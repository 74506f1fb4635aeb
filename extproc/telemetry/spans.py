"""Spans of requests: what OpenTelemetry shows of a request's way through the gateway.

    gateway ─┬─ read      first message of Envoy … body read and parsed
             ├─ match     … pool and route found (a shared store of limits is asked in this time too)
             ├─ limit     … limits reserved
             ├─ queue     … its turn came; only when it waited
             ├─ decide    … endpoint chosen
             ├─ engine    first byte sent to the engine … its last byte, as Envoy's access log tells
             └─ settle    record of the end read … accounted for

Rules of this file:

- a request belongs to a trace when its client's ``traceparent`` says "sampled", or by chance (``ratio``) when it has none;
- the engine gets a ``traceparent`` that names the engine span, so its own spans hang below; of requests that are not
  traced the header is left as it came;
- no attribute holds text of a prompt, a key, a path or a header: names from the configuration, sizes, times, codes. The
  model's name is shown only where a pool serves it;
- requests that were refused before they were read have no trace; a trace that never ends is forgotten (``most_running``).

Formats: W3C Trace Context (https://www.w3.org/TR/trace-context/); attribute names ``http.*``, ``server.*``, ``gen_ai.*`` are
OpenTelemetry's semantic conventions. Times are monotonic seconds; whoever exports turns them into dates. Envoy's times are
relative to the request's arrival there, which is taken to be the first message to us (they differ by a fraction of a
millisecond).
"""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType

from extproc.admission.dispatcher import Considered
from extproc.api.request import InferenceRequest
from extproc.ledger import Settlement
from extproc.outcome import Outcome
from extproc.routing.rejection import Rejection
from extproc.telemetry.decision import reason_of

TRACEPARENT = "traceparent"
STAGES = ("read", "match", "limit", "queue", "decide", "engine", "settle")

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LONGEST = 200
_WAITED_S = 0.001
"""A gap before the decision that is worth a span of the queue."""

Value = str | int | float | bool


class Kind(Enum):
    """What OpenTelemetry calls the kind of a span."""

    SERVER = auto()
    CLIENT = auto()
    INTERNAL = auto()


@dataclass(slots=True, frozen=True)
class Parent:
    """What a ``traceparent`` says."""

    trace_id: int
    span_id: int
    sampled: bool


@dataclass(slots=True, frozen=True)
class Span:
    """One finished span. ``parent_id`` 0: it has none. ``error``: why it failed, empty when it did not."""

    name: str
    kind: Kind
    trace_id: int
    span_id: int
    parent_id: int
    start_s: float
    end_s: float
    attributes: Mapping[str, Value]
    error: str = ""
    first_token_s: float | None = None


def read_traceparent(text: str) -> Parent | None:
    """The header's meaning, or None for one that must be ignored (W3C Trace Context, 3.2.2)."""
    found = _TRACEPARENT.fullmatch(text.strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(found[4], 16) & 1))


def write_traceparent(trace_id: int, span_id: int) -> str:
    """The header of a sampled trace."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"


@dataclass(slots=True)
class _Trace:
    trace_id: int
    root_id: int
    parent_id: int
    engine_id: int
    began: float
    last: float
    """End of the newest stage."""
    root: dict[str, Value]
    stages: list[tuple[str, float, float, Mapping[str, Value], str]] = field(default_factory=list)
    """(name, start, end, attributes, error)"""

    def stage(
        self, name: str, end: float, error: str = "", attributes: Mapping[str, Value] = MappingProxyType({})
    ) -> None:
        self.stages.append((name, self.last, max(end, self.last), attributes, error))
        self.last = max(end, self.last)

    def has(self, name: str) -> bool:
        return any(stage[0] == name for stage in self.stages)


class Traces:
    """Requests that are traced now. ``finished`` gets the spans of each that ended, the root first."""

    def __init__(
        self,
        ratio: float,
        rng: random.Random,
        clock: Callable[[], float],
        finished: Callable[[tuple[Span, ...]], None],
        *,
        follow_clients: bool = True,
        most_running: int = 20_000,
    ) -> None:
        self.forgotten = 0
        """Traces that were dropped because too many ran."""
        self._bound = round(ratio * 2**64)
        self._rng = rng
        self._clock = clock
        self._finished = finished
        self._follow = follow_clients
        self._most = most_running
        self._running: OrderedDict[str, _Trace] = OrderedDict()

    @property
    def running(self) -> int:
        """Traced requests that have not ended."""
        return len(self._running)

    def read(self, request: InferenceRequest, began: float) -> None:
        """A request was read; ``began`` is when its first message came. Decides whether it is traced."""
        header = request.head.headers.get(TRACEPARENT, "")
        parent = read_traceparent(header) if header else None
        trace_id = parent.trace_id if parent is not None else self._id(128)
        if parent is not None and self._follow:
            sampled = parent.sampled
        else:
            sampled = trace_id & (2**64 - 1) < self._bound
        if not sampled:
            return
        root: dict[str, Value] = {
            "gateway.request_id": request.id,
            "gateway.api": request.api.value,
            "gateway.stream": request.stream,
            "http.request.method": request.head.method[:_LONGEST],
        }
        trace = _Trace(
            trace_id,
            self._id(64),
            parent.span_id if parent is not None else 0,
            self._id(64),
            began,
            began,
            root,
        )
        trace.stage("read", self._clock(), attributes={"http.request.body.size": request.body_size})
        self._running[request.id] = trace
        if len(self._running) > self._most:
            self._running.popitem(last=False)
            self.forgotten += 1

    def passed(self, request_id: str, stage: str) -> None:
        """The core is through with a stage (``match``, ``limit``)."""
        trace = self._running.get(request_id)
        if trace is not None and not trace.has(stage):
            trace.stage(stage, self._clock())

    def considered(self, considered: Considered, began: float) -> None:
        """Endpoints were compared for a request; ``began`` is when that started."""
        trace = self._running.get(considered.request.id)
        if trace is None:
            return
        ranked, rejection = considered.ranked, considered.rejection
        if began > trace.last:
            # It did not go straight on: it waited for its turn.
            trace.stage("queue", began)
        trace.root |= {
            "gateway.pool": considered.match.pool.name,
            "gateway.route": considered.match.route.name,
            "gateway.tenant": considered.tenant.name,
            "gen_ai.request.model": considered.query.model[:_LONGEST],
        }
        said: dict[str, Value] = {
            "gateway.strategy": considered.strategy,
            "gateway.candidates": len(ranked),
            "gateway.prompt_tokens": considered.query.prompt_tokens,
        }
        if ranked:
            said |= {
                "gateway.endpoint": ranked[0].endpoint.key,
                "gateway.reason": reason_of(ranked),
                "gateway.matched_tokens": ranked[0].matched_tokens,
            }
        error = rejection.reason if rejection is not None else ""
        trace.stage("decide", self._clock(), error, said)

    def words(self, request_id: str) -> tuple[tuple[str, str], ...]:
        """Headers for the engine."""
        trace = self._running.get(request_id)
        return (
            ((TRACEPARENT, write_traceparent(trace.trace_id, trace.engine_id)),) if trace is not None else ()
        )

    def refused(self, request_id: str, rejection: Rejection) -> None:
        """We answered the request ourselves with an error."""
        trace = self._running.pop(request_id, None)
        if trace is None:
            return
        now = self._clock()
        stage = next(name for name in STAGES if not trace.has(name))
        if not (trace.stages and trace.stages[-1][4]):
            trace.stage(stage, now, rejection.reason)
        trace.root |= {"http.response.status_code": rejection.status, "gateway.reason": rejection.reason}
        self._end(trace, now, rejection.reason if rejection.status >= 500 else "")

    def left(self, request_id: str) -> None:
        """The client left before it had an answer."""
        trace = self._running.pop(request_id, None)
        if trace is None:
            return
        now = self._clock()
        if now - trace.last > _WAITED_S:
            trace.stage("queue", now)
        trace.root["gateway.reason"] = "client_gone"
        self._end(trace, now)

    def settled(self, settlement: Settlement, now: float) -> None:
        """The request ended; ``now`` is when we heard of it."""
        lease, end = settlement.lease, settlement.end
        trace = self._running.pop(lease.id, None)
        if trace is None:
            return
        failed = settlement.reason if settlement.outcome is Outcome.FAILURE else ""
        trace.root |= {
            "gateway.outcome": settlement.outcome.value,
            "gateway.reason": settlement.reason,
            "gateway.attempts": lease.attempts,
            "gateway.endpoint": lease.endpoint.key,
        }
        if lease.version:
            trace.root["gateway.version"] = lease.version
        first_token, ended = None, now
        if end is not None:
            trace.root["http.response.status_code"] = end.status
            ended = max(trace.began + end.duration_s, trace.last)
            if end.waiting_s is not None:
                said: dict[str, Value] = {
                    "gateway.endpoint": lease.endpoint.key,
                    "server.address": lease.endpoint.spec.address,
                    "http.response.status_code": end.status,
                    "http.response.body.size": end.response_bytes,
                }
                if end.usage is not None:
                    usage = {
                        "gen_ai.usage.input_tokens": end.usage.input,
                        "gen_ai.usage.output_tokens": end.usage.output,
                        "gateway.cached_tokens": end.usage.cached,
                    }
                    said |= {name: count for name, count in usage.items() if count is not None}
                sent = trace.last = max(trace.began + end.waiting_s, trace.last)
                first_token = sent + end.ttft_s if end.ttft_s is not None else None
                trace.stage(
                    "engine", sent + end.engine_s if end.engine_s is not None else ended, failed, said
                )
                ended = max(ended, trace.last)
        trace.last = max(now, trace.last)
        trace.stage("settle", self._clock())
        self._end(trace, ended, failed, first_token)

    def _end(self, trace: _Trace, ended: float, error: str = "", first_token: float | None = None) -> None:
        root = Span(
            "gateway",
            Kind.SERVER,
            trace.trace_id,
            trace.root_id,
            trace.parent_id,
            trace.began,
            ended,
            trace.root,
            error,
        )
        below = (
            Span(
                name,
                Kind.CLIENT if name == "engine" else Kind.INTERNAL,
                trace.trace_id,
                trace.engine_id if name == "engine" else self._id(64),
                trace.root_id,
                start,
                end,
                attributes,
                failed,
                first_token if name == "engine" else None,
            )
            for name, start, end, attributes, failed in trace.stages
        )
        self._finished((root, *below))

    def _id(self, bits: int) -> int:
        return self._rng.getrandbits(bits) or 1
