"""Differences of engine counters between two scrapes."""

from __future__ import annotations

from extproc.engines.state import EngineState


def growth(previous: EngineState | None, state: EngineState, name: str) -> float | None:
    """How much the counter grew; None when either scrape lacks it, it is no number, or it fell (a
    restart)."""
    if previous is None:
        return None
    old: float | None = getattr(previous, name)
    new: float | None = getattr(state, name)
    if old is None or new is None:
        return None
    grown = new - old
    return grown if 0.0 <= grown < float("inf") else None
