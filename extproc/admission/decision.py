"""Where a request goes."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.ledger import Lease
from extproc.routing.pool import Pool
from extproc.routing.route import Route
from extproc.scheduling.strategy import Choice


@dataclass(slots=True)
class Decision:
    """Where a request goes: ``choices`` best first, the first is the lease's endpoint, the next are the fallbacks."""

    lease: Lease
    pool: Pool
    route: Route
    choices: list[Choice]
    splice: str | None
    """Model name to put into the body, if it must change."""
    headers: tuple[tuple[str, str], ...] = ()
    """Further words to Envoy for this request alone (stream guard, shadow)."""
    fallback: str = ""
    """Model that answers in place of the one asked for, when the fallback pool does; empty: none."""
    response: tuple[tuple[str, str], ...] = ()
    """Response headers that Envoy shall add."""
