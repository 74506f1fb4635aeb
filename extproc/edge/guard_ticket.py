"""What the stream guard must know of one request, as the header that carries it through Envoy.

The decision puts the header in, Envoy shows it to the guard's own ext_proc filter and removes it before the engine. So the
guard needs no memory between the two: another process, or one just restarted, can take over. Clients cannot send it: Envoy
removes what begins with ``x-gateway-``. The level stands first because Envoy's routes look at the beginning.

    x-gateway-guard: whole_stream;api=chat;first=30;heartbeat=15;idle=120;total=900
"""

from __future__ import annotations

from dataclasses import dataclass

from extproc.api.request import Api, InferenceRequest
from extproc.routing.guard import Guard, GuardLevel

GUARD = "x-gateway-guard"


@dataclass(slots=True, frozen=True)
class GuardTicket:
    """Bounds in seconds, None: no bound; ``api`` says how the stream is to be ended."""

    level: GuardLevel
    api: Api = Api.CHAT
    first_s: float | None = None
    heartbeat_s: float | None = None
    idle_s: float | None = None
    total_s: float | None = None

    def header(self) -> str:
        """The header's value."""
        bounds = {
            "first": self.first_s,
            "heartbeat": self.heartbeat_s,
            "idle": self.idle_s,
            "total": self.total_s,
        }
        words = [f"{name}={value:g}" for name, value in bounds.items() if value is not None]
        return ";".join((self.level.value, f"api={self.api.value}", *words))


def ticket_for(guard: Guard, request: InferenceRequest) -> GuardTicket | None:
    """The ticket of a request under a guarded route; None for replies that are no streams of tokens."""
    if not (request.stream and request.api.generates):
        return None
    if guard.level is GuardLevel.FIRST_TOKEN:
        if guard.first_token_s is None:
            return None
        return GuardTicket(guard.level, request.api, guard.first_token_s)
    return GuardTicket(
        guard.level,
        request.api,
        guard.first_token_s,
        guard.heartbeat_s,
        guard.idle_s,
        guard.total_for(request.max_tokens),
    )


def read_ticket(text: str) -> GuardTicket | None:
    """The ticket in a header; None when there is none that we wrote."""
    level, *words = text.split(";")
    said = dict(word.partition("=")[::2] for word in words)

    def bound(name: str) -> float | None:
        return float(said[name]) if name in said else None

    try:
        return GuardTicket(
            GuardLevel(level),
            Api(said.get("api", Api.CHAT.value)),
            bound("first"),
            bound("heartbeat"),
            bound("idle"),
            bound("total"),
        )
    except ValueError:
        return None
