"""Any other server of the OpenAI API: nothing is scraped, everything is known from our own leases."""

from __future__ import annotations

from extproc.engines.engine import Engine
from extproc.engines.state import EngineState


def read(text: str, at: float) -> EngineState:
    """An empty state: the page of an unknown engine says nothing we understand."""
    return EngineState(at=at)


OTHER = Engine("other", read, metrics_path=None, keep_alive_s=None)
