"""What Envoy told us of a request, as plain events, and what each ending means for an endpoint.

Rules of this file (flags are Envoy's short names of response flags; documentation of %RESPONSE_FLAGS%):

- the client left (DC, DR): neutral, whatever the status;
- the connection to the engine broke or timed out (UF, UC, UR, UT, UPE, SI, LR, UMSDR): failure, even under a status 200
  (a stream cut short);
- overload protection of Envoy itself (UO, OM, RL): neutral;
- status 4xx: neutral (the client's fault); 503 and 529: neutral (busy); other 5xx: failure;
- anything else: success.

``End`` and ``Usage`` are made for every request and never changed; they are not frozen because that makes each field a
call, which is a tenth of what a record may cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """What an ending says about the endpoint that served it."""

    SUCCESS = "success"
    NEUTRAL = "neutral"
    FAILURE = "failure"


@dataclass(slots=True)
class Usage:
    """Token counts as the engine reported them; None where it did not."""

    input: int | None = None
    output: int | None = None
    cached: int | None = None


@dataclass(slots=True, frozen=True)
class FailedAttempt:
    """One attempt that failed; Envoy may go on with the next endpoint."""

    request_id: str
    cluster: str
    address: str
    status: int
    flags: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class Renewal:
    """A sign of life of a running request (Envoy sends one a minute)."""

    request_id: str
    cluster: str
    address: str
    ttft_s: float | None = None
    response_bytes: int = 0


@dataclass(slots=True)
class End:
    """The final record of a request. Durations in seconds; None where that point was never reached."""

    request_id: str
    cluster: str
    address: str
    """Host that served (or last refused) the request; empty when none was reached."""
    status: int
    details: str = ""
    flags: tuple[str, ...] = ()
    ttft_s: float | None = None
    """From the first byte sent to the engine to its first *body* byte."""
    engine_s: float | None = None
    """From the first byte sent to the engine to its last byte."""
    waiting_s: float | None = None
    """From the request's arrival to the first byte sent to an engine: the gateway's own share."""
    duration_s: float = 0.0
    response_bytes: int = 0
    attempts: int = 1
    usage: Usage | None = None


_GONE = frozenset({"DC", "DR"})
_BROKEN = frozenset({"UF", "UC", "UR", "UT", "UPE", "SI", "LR", "UMSDR", "UH"})
_OWN = frozenset({"UO", "OM", "RL", "NR", "NC"})
_BUSY = frozenset({503, 529})


def classify(status: int, flags: tuple[str, ...]) -> tuple[Outcome, str]:
    """The outcome and a short reason from a fixed set, for metrics."""
    for flag in flags:
        if flag in _GONE:
            return Outcome.NEUTRAL, "client_gone"
    for flag in flags:
        if flag in _BROKEN:
            return Outcome.FAILURE, _BROKEN_WORDS[flag]
    for flag in flags:
        if flag in _OWN:
            return Outcome.NEUTRAL, "not_sent"
    if status in _BUSY:
        return Outcome.NEUTRAL, "busy"
    if 400 <= status < 500:
        return Outcome.NEUTRAL, "busy" if status == 429 else "client_error"
    if status >= 500:
        return Outcome.FAILURE, "server_error"
    return Outcome.SUCCESS, "ok"


_BROKEN_WORDS = {
    "UH": "no_host",  # the cluster has none: its name has never been resolved
    "UF": "connect_failure",
    "UC": "connection_closed",
    "UR": "reset",
    "UT": "timeout",
    "UPE": "protocol_error",
    "SI": "idle_timeout",
    "LR": "local_reset",
    "UMSDR": "max_duration",
}
