"""The stream guard of a route: how long a client may be left without tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GuardLevel(StrEnum):
    """How far the guard goes; docs/stream-guard.md says what each costs."""

    FIRST_TOKEN = "first_token"
    """Watches until the first byte of the reply, then leaves."""
    WHOLE_STREAM = "whole_stream"
    """Watches, and passes on, every chunk."""


@dataclass(slots=True, frozen=True)
class Guard:
    """Bounds in seconds; None: no bound. All but ``first_token_s`` need the level WHOLE_STREAM."""

    level: GuardLevel = GuardLevel.FIRST_TOKEN
    first_token_s: float | None = 30.0
    """From the decision to the first byte of the reply."""
    heartbeat_s: float | None = 15.0
    """An SSE comment goes to the client after so much silence."""
    idle_s: float | None = 120.0
    """Silence of the engine within a stream."""
    total_s: float | None = None
    """Fixed part of the bound on the whole stream."""
    per_token_s: float = 0.0
    """Added to ``total_s`` for every token that the client allows (``max_tokens``)."""

    def total_for(self, max_tokens: int | None) -> float | None:
        """The bound on the whole stream of a request with this ``max_tokens``; a request that names none gets
        the fixed part alone."""
        return None if self.total_s is None else self.total_s + self.per_token_s * (max_tokens or 0)
