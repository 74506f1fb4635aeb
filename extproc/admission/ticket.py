"""A request between arrival and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from extproc.admission.decision import Decision
from extproc.api.request import InferenceRequest
from extproc.limits.limiter import Meter, Reserved
from extproc.routing.match import Match
from extproc.routing.rejection import Rejection
from extproc.routing.tenant import Tenant


@dataclass(slots=True, eq=False)
class Ticket:
    """``answer`` is there at once in the usual case. Else the request waits until ``deadline`` at the latest, and
    ``notify`` is called once when the answer is there."""

    request: InferenceRequest
    tenant: Tenant
    arrived_at: float
    notify: Callable[[], None] = lambda: None
    answer: Decision | Rejection | None = None
    match: Match | None = None
    cost: float = 1.0
    """Tokens, estimated: what fairness counts."""
    deadline: float = 0.0
    meters: Sequence[Meter] = ()
    reserved: Reserved | None = None
    flow: str = ""
    """Whose turn it takes in the queue."""
    number: int = 0
    waiting: bool = False
