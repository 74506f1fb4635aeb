"""Ways in which a simulated engine misbehaves, switched at run time."""

from __future__ import annotations

import msgspec


class Faults(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The switches, as JSON of ``/_sim/faults``. The default is an engine that works."""

    refuse: bool = False
    """Close the listening socket and reset open connections."""
    hang: bool = False
    """Accept requests (health and metrics too) and never answer."""
    status: int | None = None
    """Answer inference requests with this status."""
    share: float = 1.0
    """The share of inference requests that ``status`` meets."""
    cut: int | None = None
    """Reset the connection after so many SSE events, or half-way through a reply that is not streamed."""
    slow: float = 1.0
    """Factor on the time of every step."""
    unhealthy: bool = False
    """/health answers 503."""
    freeze_metrics: bool = False
    """/metrics repeats the page it showed first after this was switched on."""
    garbage_metrics: bool = False
    """/metrics answers 200 with what no parser reads."""
    no_metrics: bool = False
    """/metrics answers 404."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            ValueError: a value out of its range.
        """
        if not 0 <= self.share <= 1:
            raise ValueError("share must be between 0 and 1")
        if self.slow <= 0:
            raise ValueError("slow must be above 0")
        if self.status is not None and not 200 <= self.status <= 599:
            raise ValueError("status must be an HTTP status from 200 to 599")
        if self.cut is not None and self.cut < 0:
            raise ValueError("cut must not be negative")

    def changed(self, update: bytes) -> Faults:
        """These switches with the ones named in a JSON object changed.

        Raises:
            msgspec.ValidationError, msgspec.DecodeError: unknown switch, wrong type or value.
        """
        merged = msgspec.to_builtins(self) | msgspec.json.decode(update, type=dict[str, object])
        return msgspec.convert(merged, Faults)
